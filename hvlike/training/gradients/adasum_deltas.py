"""Adasum reduces what a step has changed, not the gradients before it.

start  = parameters                     kept
step()                                  the wrapped optimizer, on this rank's own gradients
delta  = parameters - start             in the parameters' own memory
delta  = Adasum of all ranks' deltas    planned, like gradients
parameters = start + delta              the same on all ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.reduction import check_adasum
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.aliases import first_sharers
from hvlike.training.gradients.grad_state import GradState, reset
from hvlike.training.gradients.gradients import Gradients
from hvlike.training.gradients.reduction import Reducer, Reduction


class AdasumDeltas(Gradients):
    """Gradients stay this rank's own, and IDLE; the changes of a step are reduced instead."""

    def __init__(
        self, optimizer: Optimizer, reduction: Reduction, names: Mapping[Tensor, str], backward_passes_per_step: int
    ) -> None:
        self._for_scaler: Tensor | None = None  # Stands for a gradient while a GradScaler looks, not in the step
        self._starts: list[Tensor] = []  # Copies, kept: new memory would cost as much as the copy
        self._is_stepping = False
        super().__init__(optimizer, reduction, names, backward_passes_per_step)

    def arrived(self, slot: GradState) -> None:
        """Do nothing: gradients add up on this rank."""

    def synchronize(self, call: str = "optimizer.synchronize()") -> None:
        """Reduce nothing; after a closure in step() refuse gradients whose changes will not be reduced."""
        if self.keep_local:
            raise usage_errors.inside_no_sync(call)
        if self._hooks.lost:
            self.take_back()
        late = self._late_gradients() if self._is_stepping else None
        if late is not None:
            raise late

    def _stays(self, slot: GradState | None) -> bool:
        """Once reduced, always: whether a frozen parameter has a gradient may differ between ranks."""
        return slot is not None

    def prepare_for_scaler(self) -> None:
        """Let all ranks find an infinity where one does, so that all skip the step or none. Collective; blocks."""
        self.refresh()
        if not self._slots or self.reduction.is_local(current()):
            return
        parameters = self._parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flag = torch.tensor(int(not _all_finite(gradients)), dtype=torch.int32, device="cpu")
        if int(allreduce(flag, op=ReduceOp.MAX, process_set=self.reduction.process_set)):
            if not int(flag):
                parameters[0].grad = self._slots[0].nothing().fill_(torch.inf)
        elif not gradients:
            # A scaler refuses an optimizer without a gradient, but this rank must step with the others.
            parameters[0].grad = self._for_scaler = self._slots[0].nothing()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Reduce what a step changes; a rank whose step raises takes over the change of the others, and raises then."""
        self.synchronize("optimizer.step()")
        placeholder, self._for_scaler = self._for_scaler, None
        if placeholder is not None and self._parameters[0].grad is placeholder:
            self._parameters[0].grad = None
        self.refresh()
        for slot in self._slots:
            self._check(slot)
        self._check_memory()
        reducer = self._ready_reducer()
        if reducer is None:
            yield
            return
        self.comparison.updates += 1
        self._remember()
        self._is_stepping = True
        try:
            yield
        except Exception:
            torch._foreach_copy_(self._values(), self._starts)
            self._reduce_changes(reducer)
            raise
        finally:
            self._is_stepping = False
        self._reduce_changes(reducer)

    def _check(self, slot: GradState) -> None:
        try:
            check_adasum(slot.parameter.dtype)
        except UsageError as error:
            raise UsageError(f"DistributedOptimizer: parameter {slot.name!r}: {error}") from None

    def _check_memory(self) -> None:
        if len(self._starts) == len(self._parameters):
            return
        for place, first in enumerate(first_sharers(self._parameters)):
            if place != first:
                raise UsageError(
                    f"DistributedOptimizer: parameters {self._slots[first].name!r} and {self._slots[place].name!r} "
                    "share memory, where op=Adasum would count what has changed twice. Pass one of them."
                )

    def _values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def _remember(self) -> None:
        values = self._values()
        fits = len(values) == len(self._starts) and all(
            start.shape == value.shape and start.dtype is value.dtype and start.device == value.device
            for start, value in zip(self._starts, values, strict=True)
        )
        if fits:
            torch._foreach_copy_(self._starts, values)
        else:
            self._starts = [value.clone() for value in values]

    def _reduce_changes(self, reducer: Reducer) -> None:
        """Set the parameters to their start plus the reduced change, or to their start if the reduction fails."""
        deltas = self._values()
        torch._foreach_sub_(deltas, self._starts)
        try:
            reducer.finish(deltas)
        except BaseException:
            torch._foreach_copy_(deltas, self._starts)
            self.abandon()
            raise
        torch._foreach_add_(deltas, self._starts)
        reset(self._slots)


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether there is no infinity and no NaN; waits once for each GPU, not for each gradient."""
    answers: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        answers.setdefault(gradient.device, []).append(values.isfinite().all())
    return all(bool(torch.stack(each).all()) for each in answers.values())
