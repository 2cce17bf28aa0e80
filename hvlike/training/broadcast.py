"""Make all ranks start from one rank's parameters and optimizer state.

Before anything is sent the ranks compare the names, shapes and dtypes of what they hold. The root sends its list, every
rank compares it with its own, and one flag is reduced. The ranks exchange details only where something differs, so the
cost per rank does not grow with their number. Structures are pickled without their tensors, which travel as such.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.operation import synchronize
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.broadcast import broadcast_async_
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.api.outcome import settle
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import check_tensors, check_writable
from hvlike.collectives.session.basics import rank
from hvlike.errors import MismatchError, ShapeMismatchError, UsageError, WrongTypeError
from hvlike.training.gradients.checksums import is_plain
from hvlike.training.gradients.optimizer_wrapper import DelegatingOptimizer
from hvlike.transport.memory.own_memory import check_memory, check_stand_in


@dataclass(frozen=True)
class TensorForm:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def __str__(self) -> str:
        return f"shape {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[Tensor, int]) -> None:
        super().__init__(file, protocol=5)
        self.known = known
        self.tensors: dict[Tensor, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, Tensor):
            return None
        if obj in self.known:
            return "known", self.known[obj]
        check_stand_in("a state, a tensor in it", obj)
        if not is_plain(obj):
            # Sparse or quantized: it travels pickled, as torch does that.
            return None
        return "tensor", self.tensors.setdefault(obj, len(self.tensors))


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, known: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.sources = {"known": known, "tensor": tensors}

    def persistent_load(self, pid: tuple[str, int]) -> Tensor:
        source, number = pid
        return self.sources[source][number]


def pack(structure: Any, known: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return the pickled structure and the tensors in it, each once; `known` ones (parameters) only as their index."""
    file = io.BytesIO()
    packer = _Packer(file, {tensor: place for place, tensor in enumerate(known)})
    packer.dump(structure)
    return file.getvalue(), list(packer.tensors)


def unpack(data: bytes, known: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    return _Unpacker(data, known, tensors).load()


_MOST = 3


def check_same(
    what: str, mine: Mapping[str, Any], root_rank: int, process_set: ProcessSet | None, error: type[MismatchError]
) -> None:
    """Check that `mine`, descriptions by name, is equal on all ranks, or raise `error` on all. Collective; blocks."""
    root: Mapping[str, Any] = broadcast_object(dict(mine), root_rank, process_set=process_set)
    differences = find_differences(root, mine)
    flag = torch.tensor(int(bool(differences)), dtype=torch.int32, device="cpu")
    if not int(allreduce(flag, op=ReduceOp.MAX, process_set=process_set)):
        return
    by_rank = allgather_object((rank(), differences), process_set=process_set)
    details = "; ".join(f"rank {number}: {', '.join(found)}" for number, found in by_rank if found)
    raise error(
        f"{what}: the ranks do not hold the same as root rank {root_rank}. {details}. Build the same on every rank."
    )


def find_differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    missing = [f"{name!r} is missing" for name in expected if name not in got]
    extra = [f"{name!r} exists only here" for name in got if name not in expected]
    changed = [
        f"{name!r}: expected {expected[name]}, got {got[name]}"
        for name in expected
        if name in got and expected[name] != got[name]
    ]
    found = [*changed, *missing, *extra]
    return found if len(found) <= _MOST else [*found[:_MOST], f"and {len(found) - _MOST} more"]


Parameters: TypeAlias = Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet | None = None) -> None:
    """Copy the root's tensors into those of all ranks, in place.

    Collective: every rank of the set calls it. Blocks until done.

    Args:
        params: A state dict, or an iterable (list, generator) of tensors or of pairs (name, tensor). Any shape and
            dtype, also non-contiguous tensors and parameters that require a gradient.
        root_rank: Rank of the root in the job.
        process_set: The ranks that get the tensors. Default: all.

    Raises:
        UsageError: A value is not a tensor, or is a parameter of a lazy module that has no shape yet.
        ShapeMismatchError: On every rank: names, shapes or dtypes differ between ranks. Nothing has been changed then.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    Source: horovod.torch.broadcast_parameters.
    """
    tensors = settle("broadcast_parameters", lambda: named_tensors(params), process_set)
    forms = {name: str(TensorForm.of(tensor)) for name, tensor in tensors.items()}
    check_same("broadcast_parameters", forms, root_rank, process_set, ShapeMismatchError)
    broadcast_tensors("broadcast_parameters", tensors, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: nn.Module | None = None, process_set: ProcessSet | None = None
) -> None:
    """Give the optimizer of every rank the root's state and options; parameters are not touched.

    Tensors are sent as tensors, everything else is pickled. The root's optimizer is not changed.
    Collective: every rank of the set calls it. Blocks until done.

    Args:
        optimizer: Any torch optimizer, wrapped or not. Its state may be empty or different on other ranks; the root's
            replaces it.
        root_rank: Rank of the root in the job.
        model: Accepted for compatibility with Horovod and ignored.
        process_set: The ranks that get the state. Default: all.

    Raises:
        UsageError: optimizer is not a torch.optim.Optimizer.
        MismatchError: On every rank: classes of optimizers or parameters of groups differ between ranks.
        UsageError: On the root: its state or an option does not pickle.
        HorovodInternalError: Then on all other ranks; nothing has been changed.

    Source: horovod.torch.broadcast_optimizer_state.
    """
    if isinstance(optimizer, DelegatingOptimizer):
        optimizer = optimizer.wrapped
    if not isinstance(optimizer, Optimizer):
        raise WrongTypeError(
            f"broadcast_optimizer_state expects a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_same(_STATE, _layout_of(optimizer), root_rank, process_set, MismatchError)
    is_root = rank() == root_rank

    def packed() -> tuple[bytes, list[Tensor]]:
        return _pack_state(optimizer, parameters) if is_root else (b"", [])

    def adopt() -> None:
        if not is_root:
            state, options = unpack(data, parameters, list(numbered.values()))
            _adopt(optimizer, state, options)

    data, tensors = settle(_STATE, packed, process_set)
    told = data, [TensorForm.of(tensor) for tensor in tensors]
    data, forms = broadcast_object(told if is_root else None, root_rank, process_set=process_set)

    def with_memory() -> dict[str, Tensor]:
        here = tensors if is_root else _memory_for(forms, parameters)
        return {str(number): tensor for number, tensor in enumerate(here)}

    numbered = settle(_STATE, with_memory, process_set)
    broadcast_tensors(_STATE, numbered, root_rank, process_set)
    settle(_STATE, adopt, process_set)


_STATE = "broadcast_optimizer_state"


def _layout_of(optimizer: Optimizer) -> dict[str, str]:
    """Describe the class of an optimizer and its parameters, which are to be the same on all ranks."""
    layout: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = f"parameter {index} of group {number}"
            check_stand_in(f"{_STATE}, {name}", parameter)
            layout[name] = str(TensorForm.of(parameter))
    layout["class"] = optimizer.__class__.__name__
    return layout


def _pack_state(optimizer: Optimizer, parameters: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return what the root sends, state and options, and the tensors in it."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return pack((dict(optimizer.state), options), parameters)


def _memory_for(forms: Sequence[TensorForm], parameters: Sequence[Tensor]) -> list[Tensor]:
    """On the host if the root's lies there, else where this rank's parameters are."""
    device = next((each.device for each in parameters if each.device.type != "cpu"), torch.device("cpu"))
    places = ["cpu" if form.device_type == "cpu" else device for form in forms]
    return [torch.empty(it.shape, dtype=it.dtype, device=place) for it, place in zip(forms, places, strict=True)]


def named_tensors(params: object) -> dict[str, Tensor]:
    """Return the tensors by name or place. Raises UsageError for what broadcast_parameters does not accept."""
    if isinstance(params, nn.Module):
        raise WrongTypeError("broadcast_parameters expects tensors, got a module. Pass model.state_dict().")
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise WrongTypeError(
            f"invalid params of type: {type(params).__name__}. broadcast_parameters expects a state dict, or an "
            "iterable of tensors or of (name, tensor)."
        )
    items = params.items() if isinstance(params, Mapping) else params
    tensors: dict[str, Tensor] = {}
    for place, item in enumerate(items):
        name, value = item if isinstance(item, tuple) and len(item) == 2 else (str(place), item)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise WrongTypeError(
                f"broadcast_parameters: the value of {name!r} is not a tensor but of type {type(value).__name__}, "
                "which cannot be changed in place. Leave it out, send it with hvlike.broadcast_object and load it "
                "yourself."
            )
        check_memory(f"broadcast_parameters {name!r}", value)
        if name in tensors:
            raise UsageError(f"broadcast_parameters: the name {name!r} occurs twice.")
        tensors[name] = value
    return tensors


def broadcast_tensors(call: str, tensors: Mapping[str, Tensor], root_rank: int, process_set: ProcessSet | None) -> None:
    """Copy the root's tensors into those of all ranks, once all ranks have found that theirs can be written to."""

    def check() -> None:
        for name, tensor in tensors.items():
            check_tensors(call, name, [tensor])
            check_writable(call, name, [tensor])

    settle(call, check, process_set)
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name=f"{call}.{name}", process_set=process_set)
        for name, tensor in tensors.items()
    ]
    for handle in handles:
        synchronize(handle)


def _adopt(optimizer: Optimizer, state: Mapping[Any, Any], options: list[dict[str, Any]]) -> None:
    """Replace state and options by the root's; load_state_dict would cast state to the dtypes of the parameters."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for key in [key for key in group if key != "params" and key not in values]:
            del group[key]
        group.update(values)
