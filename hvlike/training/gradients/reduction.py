"""How the gradients of one optimizer or module are reduced: the settings."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name, reduce_op
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.controller.owner_names import Owner
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import BucketSizes, Entry
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.context import Context, current
from hvlike.errors import UsageError
from hvlike.training.gradients.grad_state import gradient_dtype
from hvlike.training.gradients.parameters import Groups, group_indices
from hvlike.training.gradients.planned_reducer import PlannedReducer


class Reducer(Protocol):
    """Reduces tensors of the same shapes in each step: a PlannedReducer or a HookedReducer."""

    @property
    def wants_marks(self) -> bool:
        """Every tensor must be marked ready; else the first one of a step is enough."""

    @property
    def active(self) -> int:
        """How many ranks took part in the last step with tensors of their own; 0: unknown."""

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Tensor `index` is final for this step."""

    @property
    def absent(self) -> Collection[int]:
        """The tensors that no rank had in the last step, by index; of those that this one had, none."""

    def finish(self, tensors: Sequence[Tensor], missing: Collection[int] = ()) -> dict[int, Tensor]:
        """Wait until all are reduced, in place; return those that replace others, by index.

        missing: those for which zeros are here as this rank has nothing.
        """

    def drop(self) -> None:
        """Forget what was agreed, and the step that has begun: the owner will not use it again. Local."""


def ranks_of_group(given: Any) -> Any:
    """Return the process set of a group of torch.distributed, and everything else as it is.

    Raises: UsageError for a group of another backend.
    """
    if not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
        return given
    # Whoever has such a group has loaded it.
    from hvlike.torch_distributed.groups import process_set_of

    return process_set_of(given)


def registered_set(given: object, owner: str) -> ProcessSet | None:
    """Return the set, None for all ranks; `given` may be a group of torch.distributed.

    Raises: UsageError unless it is registered.
    """
    process_set = ranks_of_group(given)
    if process_set is None or process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        raise UsageError(
            f"{owner}: process_set must be a ProcessSet that was passed to init(process_sets=[...]) or returned by "
            f"add_process_set, got {process_set!r}."
        )
    return process_set


DISTRIBUTED_OPTIMIZER = "DistributedOptimizer"


@dataclass(frozen=True)
class Reduction:
    """The settings; immutable, pickles."""

    op: ReduceOp = ReduceOp.AVERAGE
    compression: CompressorLike = field(default_factory=lambda: Compression.none)
    predivide_factor: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSet | None = None
    owner: str = DISTRIBUTED_OPTIMIZER  # The class that it belongs to, for names and errors
    bucket_bytes: int | None = None  # How much is reduced together; None: what the settings or hvlike choose

    def __post_init__(self) -> None:
        op = reduce_op(self.op)
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise UsageError(
                f"{self.owner}: op {op_name(op)} is not supported for gradients; expected Average, Sum or Adasum."
            )
        object.__setattr__(self, "op", op)
        if self.predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
            raise UsageError(f"gradient_predivide_factor not supported with op != Average, got op {op_name(op)}.")
        if not self.predivide_factor > 0:
            raise UsageError(f"gradient_predivide_factor must be > 0, got {self.predivide_factor}.")
        check_compressor(self.compression)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduction:
        # A copy of the process set would not be registered.
        return replace(self, groups=deepcopy(self.groups, memo), compression=deepcopy(self.compression, memo))

    @property
    def of_deltas(self) -> bool:
        return self.op is ReduceOp.ADASUM

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return parameter.dtype if self.of_deltas else gradient_dtype(parameter)

    def is_local(self, context: Context) -> bool:
        """True with one rank in the set, or where this rank is not in it."""
        process_set = self.process_set
        if process_set is None or process_set.process_set_id is None:
            return process_set is None and context.world.size == 1
        return not process_set.included() or process_set.size() == 1

    def size(self, context: Context) -> int:
        return (self.process_set and self.process_set.size()) or context.world.size

    def announce(self, context: Context, owner: Owner, given: Mapping[Tensor, str]) -> None:
        """The owner was made in this thread, for which it will be named as it is used. Local."""
        if not self.is_local(context):
            names = context.find_set(self.process_set, self.owner).owner_names
            names.announce(self._kind(given, threading.current_thread()), owner)

    def automatic_name(
        self,
        context: Context,
        owner: Owner,
        inside: str,
        given: Mapping[Tensor, str],
        advice: str,
        thread: threading.Thread,
    ) -> str:
        """What the ranks match an optimizer by: its class, what it has inside, and a number if there are several such.

        Optimizers count when they first reduce, in one order everywhere: some ranks make copies for checkpoints.
        given: names that the program has given to parameters: by the first one those of several threads are told apart.
        advice: what to do where they are not. thread: of the program, in which the owner is used.
        Raises: UsageError, where the ranks cannot tell them apart.
        """
        names = context.find_set(self.process_set, self.owner).owner_names
        kind = self._kind(given, thread)
        names.claim(kind, owner, advice, thread)
        name = f"{self.owner}({inside})" if kind == self.owner else f"{self.owner}({inside}) in a thread"
        number = names.draw(name)
        return name if number == 0 else f"{name} #{number + 1}"

    def _kind(self, given: Mapping[Tensor, str], thread: threading.Thread) -> str:
        first = next(iter(given.values()), None)
        by_order = first is None or thread is threading.main_thread()
        return self.owner if by_order else f"{self.owner}.{first}"

    def reducer(self, name: str, names: Sequence[str], parameters: Sequence[Tensor]) -> PlannedReducer:
        size, factor = self.size(current()), self.predivide_factor
        entries = [
            Entry(name=each, shape=tuple(parameter.shape), dtype=self._dtype_of(parameter), device=parameter.device)
            for each, parameter in zip(names, parameters, strict=True)
        ]
        reducer = PlannedReducer(
            entries,
            ReductionSettings(self.op, size, 1.0 / factor, factor, self.compression),
            name=name,
            process_set=self.process_set,
            groups=group_indices(self.groups, parameters),
        )
        if self.bucket_bytes is not None:
            reducer.resize(BucketSizes(self.bucket_bytes, self.bucket_bytes))
        return reducer
