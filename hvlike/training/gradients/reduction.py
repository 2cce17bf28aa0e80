"""How the gradients of one optimizer or module are reduced: the settings, fixed when it is wrapped.

A Reduction makes the reducer that gradients are handed to.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name, reduce_op
from hvlike.collectives.compression import (
    Compression,
    CompressorLike,
    StatefulCompressor,
    check_compressed_op,
    check_compressor,
)
from hvlike.collectives.persistent.planned_reducer import Entry, PlannedReducer
from hvlike.collectives.requests.plan import BucketSizes
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import Context, current
from hvlike.errors import UsageError
from hvlike.training.gradients.parameters import Groups, group_indices


class Reducer(Protocol):
    """What reduces a list of tensors, the same one over and over: a PlannedReducer."""

    @property
    def wants_marks(self) -> bool:
        """True while every tensor is to be marked ready; else the first one of a step is enough."""

    @property
    def active(self) -> int:
        """How many ranks took part in the last step with tensors of their own; 0 where that is not known."""

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Tensor `index` is final for this step."""

    def finish(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Wait until all are reduced, in place; those that take the place of others, by index."""

    def close(self) -> None:
        """Forget what was agreed."""


@dataclass(frozen=True)
class Reduction:
    """The reduction that a DistributedOptimizer, or a module, is given; immutable, pickles.

    Raises: UsageError for an op that gradients cannot be reduced with, and for factors that do not fit the op.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compression: CompressorLike = field(default_factory=lambda: Compression.none)
    predivide_factor: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSet | None = None
    owner: str = "DistributedOptimizer"
    """What it belongs to, for names and errors."""
    bucket_bytes: int | None = None
    """How much is reduced together; None: what the knobs or hvlike choose."""

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
        check_compressed_op(check_compressor(self.compression), op)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduction:
        # A copied process set would not be the one that was registered.
        return replace(self, groups=deepcopy(self.groups, memo), compression=deepcopy(self.compression, memo))

    @property
    def memory(self) -> StatefulCompressor | None:
        """The compressor, where it remembers something from step to step."""
        return self.compression if isinstance(self.compression, StatefulCompressor) else None

    @property
    def of_deltas(self) -> bool:
        """True when what a step has changed is reduced, and not the gradients before it."""
        return self.op is ReduceOp.ADASUM

    def is_local(self, context: Context) -> bool:
        """True where there is nobody to reduce with: one rank in the set, or this rank not a member of it."""
        process_set = self.process_set
        if process_set is None or process_set.process_set_id is None:
            return process_set is None and context.world.size == 1
        return not process_set.included() or process_set.size() == 1

    def size(self, context: Context) -> int:
        """How many ranks reduce together."""
        return (self.process_set and self.process_set.size()) or context.world.size

    def automatic_name(self, context: Context) -> str:
        """Return a name for the next owner that reduces in this set; the same on all its ranks.

        Counted when an optimizer first reduces, which all ranks do in the same order. Copies and optimizers that
        only some ranks make (to write a checkpoint, say) do not count.
        """
        set_state = context.set_state(self.process_set, self.owner)
        number = set_state.controller.optimizer_names.next(self.owner)
        return f"{self.owner}.{number}"

    def reducer(
        self, name: str, names: Sequence[str], parameters: Sequence[Tensor], extra: Sequence[Entry] = ()
    ) -> PlannedReducer:
        """Return a reducer for the gradients of these parameters, and what else there is. Local; needs init()."""
        current()
        if self.memory is not None:
            self.memory.claim(self)
        entries = [
            Entry(name=each, shape=tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device)
            for each, parameter in zip(names, parameters, strict=True)
        ]
        reducer = PlannedReducer(
            [*entries, *extra],
            name=name,
            op=self.op,
            process_set=self.process_set,
            prescale=1.0 / self.predivide_factor,
            postscale=self.predivide_factor,
            compression=check_compressor(self.compression),
            groups=group_indices(self.groups, parameters),
        )
        if self.bucket_bytes is not None:
            reducer.resize(BucketSizes(self.bucket_bytes, self.bucket_bytes))
        return reducer
