"""What has to be equal on all ranks, is compared with a plan, and warned of: where training starts, and the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakMethod

from torch import Tensor
from torch.optim import Optimizer

from hvlike.collectives.health.option_watch import Options
from hvlike.collectives.persistent.planned_reducer import PlannedReducer
from hvlike.training.gradients.parameters import describe_options, value_checksums


class Comparison:
    """Of one optimizer, or of the parameters of a module, which have no options."""

    def __init__(self, optimizer: Any) -> None:
        self.updates = 0  # Calls of step() that have ended
        self._optimizer = optimizer
        self._reducer: PlannedReducer | None = None
        self._start: dict[str, int] = {}
        self._unused: tuple[int | None, int] = (None, 0)  # Of a plan, when it was read first: reductions without one

    def start_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare these values, those of now, with the next plan. Local."""
        self._start = dict(zip(tensors, value_checksums(list(tensors.values())), strict=True))

    def begin(self, reducer: PlannedReducer) -> None:
        """Compare with the plan that this reducer is about to agree on, what `start_with` got only with that. Local."""
        self._reducer, reducer.start, self._start = reducer, self._start, {}
        if isinstance(self._optimizer, Optimizer):
            reducer.watch_options(WeakMethod(self._options))

    def _options(self) -> Options:
        assert self._reducer is not None
        plan, unused = self._reducer.serial, self._reducer.served - self.updates
        if plan != self._unused[0]:
            self._unused = (plan, unused)
        counted = ("reductions that no step() has used", str(unused - self._unused[1]))
        return (*describe_options(self._optimizer.param_groups), counted)
