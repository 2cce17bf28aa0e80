"""All ranks start from the same module: compared first, then parameters and buffers are those of one rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hvlike.collectives.process_set import ProcessSet
from hvlike.errors import MismatchError
from hvlike.training.agreement import check_same
from hvlike.training.broadcast_state import broadcast_tensors
from hvlike.training.tensor_pickle import TensorForm

_CALL = "DistributedDataParallel"


def start_alike(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Check that the ranks have the same parameters and buffers, and give them the values of those of the root.

    root_rank: global rank. Collective over the process set; blocks.
    Raises: MismatchError on every rank, naming the ranks and what differs; nothing has been changed then.
    """
    forms = {f"parameter {name}": _describe(tensor) for name, tensor in parameters.items()}
    forms |= {f"buffer {name}": str(TensorForm.of(tensor)) for name, tensor in buffers.items()}
    check_same(f"{_CALL} expects same model across all ranks", forms, root_rank, process_set, MismatchError)
    give(parameters, buffers, root_rank, process_set)


def give(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Copy the root's parameters and buffers into those of all ranks. Collective over the process set; blocks."""
    broadcast_tensors(_CALL, {**parameters, **buffers}, root_rank, process_set)


def _describe(parameter: Tensor) -> str:
    frozen = "" if parameter.requires_grad else " without gradient"
    return f"{TensorForm.of(parameter)} strides {list(parameter.stride())}{frozen}"
