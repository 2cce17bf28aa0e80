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
from typing import Final

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
from hvlike.training.gradients.grad_state import GradState, Phase, reset
from hvlike.training.gradients.parameters import check_passes
from hvlike.training.gradients.reduced_parameters import ReducedParameters
from hvlike.training.gradients.reducers import Reducers
from hvlike.training.gradients.reduction import Reducer, Reduction


class AdasumDeltas:
    """Gradients stay this rank's own, and the changes of a step are reduced instead.

    It stands in the place of Gradients. Nothing is under way between backward and step: it is always IDLE.
    """

    phase: Final = Phase.IDLE

    def __init__(
        self, optimizer: Optimizer, reduction: Reduction, names: Mapping[Tensor, str], backward_passes_per_step: int
    ) -> None:
        self.backward_passes_per_step = check_passes(backward_passes_per_step)
        self.parameters = ReducedParameters(self, optimizer, reduction.owner, names, AdasumDeltas.arrived)
        self.reducers = Reducers(self.parameters, reduction, usage_errors.SEVERAL_THREADS, self.parameters.given_names)
        self.keep_local = False  # Inside no_sync()
        self._for_scaler: Tensor | None = None  # Stands for a gradient while a GradScaler looks, not in the step
        self._starts: list[Tensor] = []  # Copies, kept: new memory would cost as much as the copy
        self._is_stepping = False
        self.refresh()
        reset(self.parameters.slots)

    def arrived(self, slot: GradState) -> None:
        """Do nothing: gradients add up on this rank."""

    def has_lost(self) -> None:
        """Do nothing: no gradient is under way."""

    def used_in_backward(self, slot: GradState) -> None:
        """A hook of the program has stepped on this rank's own gradient. In backward."""
        raise usage_errors.used_in_backward([slot.name])

    def being_reduced(self) -> list[Tensor]:
        """Return nothing: no gradient is under way."""
        return []

    def refresh(self) -> None:
        """Follow changes of the parameter groups, of requires_grad, and of the running hvlike. Local."""
        if self.parameters.refresh(_is_reduced) or self.reducers.is_gone():
            self.reducers.drop()
        self.parameters.note_frozen()

    def synchronize(self, call: str = "optimizer.synchronize()") -> None:
        """Reduce nothing; after a closure in step() refuse gradients whose changes will not be reduced."""
        if self.keep_local:
            raise usage_errors.inside_no_sync(call)
        if self.parameters.hooks.lost:
            self.reducers.take_back()
        late = self.parameters.late_gradients() if self._is_stepping else ()
        if late:
            raise usage_errors.came_late(late)

    def set_passes(self, passes: int) -> None:
        """Set how many passes the program makes before a step: they add up on this rank anyway. Local."""
        self.backward_passes_per_step = check_passes(passes)

    def discard(self) -> None:
        """Do nothing: no gradient is under way."""

    def abandon(self) -> None:
        """Forget the reducer. Local."""
        self.reducers.abandon()
        reset(self.parameters.slots)

    def prepare_for_scaler(self) -> None:
        """Let all ranks find an infinity where one does, so that all skip the step or none. Collective; blocks."""
        self.refresh()
        parameters, slots, reduction = self.parameters.tensors, self.parameters.slots, self.reducers.reduction
        if not slots or reduction.is_local(current()):
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flag = torch.tensor(int(not _all_finite(gradients)), dtype=torch.int32, device="cpu")
        if int(allreduce(flag, op=ReduceOp.MAX, process_set=reduction.process_set)):
            if not int(flag):
                parameters[0].grad = slots[0].nothing().fill_(torch.inf)
        elif not gradients:
            # A scaler refuses an optimizer without a gradient, but this rank must step with the others.
            parameters[0].grad = self._for_scaler = slots[0].nothing()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Reduce what a step changes; a rank whose step raises takes over the change of the others, and raises then."""
        self.synchronize("optimizer.step()")
        placeholder, self._for_scaler = self._for_scaler, None
        if placeholder is not None and self.parameters.tensors[0].grad is placeholder:
            self.parameters.tensors[0].grad = None
        self.refresh()
        for slot in self.parameters.slots:
            _check(slot)
        self._check_memory()
        reducer = self.reducers.ready()
        if reducer is None:
            yield
            return
        self.reducers.comparison.updates += 1
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

    def _check_memory(self) -> None:
        parameters, slots = self.parameters.tensors, self.parameters.slots
        if len(self._starts) == len(parameters):
            return
        for place, first in enumerate(first_sharers(parameters)):
            if place != first:
                raise UsageError(
                    f"DistributedOptimizer: parameters {slots[first].name!r} and {slots[place].name!r} "
                    "share memory, where op=Adasum would count what has changed twice. Pass one of them."
                )

    def _values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters.tensors]

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
        reset(self.parameters.slots)


def _is_reduced(parameter: Tensor, slot: GradState | None) -> bool:
    """Once reduced, always: whether a frozen parameter has a gradient may differ between ranks."""
    return parameter.requires_grad or parameter.grad is not None or slot is not None


def _check(slot: GradState) -> None:
    try:
        check_adasum(slot.parameter.dtype)
    except UsageError as error:
        raise UsageError(f"DistributedOptimizer: parameter {slot.name!r}: {error}") from None


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether there is no infinity and no NaN; waits once for each GPU, not for each gradient."""
    answers: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        answers.setdefault(gradient.device, []).append(values.isfinite().all())
    return all(bool(torch.stack(each).all()) for each in answers.values())
