"""The gradients of an optimizer between backward and step: which have arrived, and what is reduced.

    IDLE ------- a pass, not the last ------> ACCUMULATING       a hook, in backward's threads (one for each device)
     |                                          |      |
     |  the first gradient of the last pass     |      |
     +----------------> REDUCING <--------------+      |         the same, with the lock held
     |                     |                           |
     |  synchronize()      |  synchronize()            |         the program's thread
     +--------------> SYNCHRONIZED <-------------------+
                           |
            step(): IDLE   |   another pass: as from IDLE

zero_grad() and step() end in IDLE, abandon() and errors of a reduction from any phase. What calls do in each phase is
drawn in hvlike/training/distributed_optimizer.py. Three objects make it up:

    ReducedParameters    which parameters, and the hooks that see their gradients arrive
    Reducers             the name, and the reducer that was made for these parameters
    Gradients            the phase: what an arrival, a pass and a step mean for an optimizer

For a module (ModuleGradients) and with op=Adasum (AdasumDeltas) others stand in the place of the third.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from hvlike.errors import UsageError
from hvlike.system.system import system
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.contributions import Arrived, look_at
from hvlike.training.gradients.grad_state import GradState, Phase, are_those, gradient_of, note_reduced, reset
from hvlike.training.gradients.parameters import check_passes
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.training.gradients.reduced_parameters import ReducedParameters
from hvlike.training.gradients.reducers import Reducers
from hvlike.training.gradients.reduction import Reduction


class Gradients:
    """Reduces the gradients of an optimizer's parameters over the ranks.

    A hook counts each gradient that backward has finished and, with the last pass of a step, hands it to the reducer.
    The reducer is made for the parameters that require a gradient; when these change, it is replaced.
    """

    def __init__(
        self, optimizer: Any, reduction: Reduction, names: Mapping[Tensor, str], backward_passes_per_step: int
    ) -> None:
        self.backward_passes_per_step = check_passes(backward_passes_per_step)
        self.parameters = ReducedParameters(self, optimizer, reduction.owner, names, Gradients.arrived)
        self.reducers = Reducers(self.parameters, reduction, usage_errors.SEVERAL_THREADS, self.parameters.given_names)
        self.phase = Phase.IDLE
        self.keep_local = False  # Inside no_sync(): arrivals are not reduced
        self._collects = False  # While gradients are reduced: an arrival only has to be noted
        self._lock = system.Lock()
        self.refresh()
        reset(self.parameters.slots)
        # The first pass looks once more: programs may add hooks after they have wrapped.
        self.parameters.look_again()

    # -- which parameters are reduced ------------------------------------------------------------

    def refresh(self) -> None:
        """Follow changes of the parameter groups, of requires_grad, and of the running hvlike. Local."""
        if self.parameters.refresh(self._is_reduced) or self.reducers.is_gone():
            self.reducers.drop()
        self.parameters.note_frozen()

    def _is_reduced(self, parameter: Tensor, slot: GradState | None) -> bool:
        return parameter.requires_grad or parameter.grad is not None or self.reducers.keeps(slot)

    def has_lost(self) -> None:
        """Another wrapper reduces a parameter now. What has arrived here, and waits, is its concern. Local."""
        if self.phase is Phase.REDUCING and self.reducers.current is None:
            self.abandon()

    def used_in_backward(self, slot: GradState) -> None:
        """A hook of the program has stepped on a gradient that is not reduced yet. In backward."""
        raise usage_errors.used_in_backward([slot.name])

    def being_reduced(self) -> list[Tensor]:
        """Return the parameters whose gradients are under way, or waited for by step(). Local."""
        if self.phase is not Phase.REDUCING:
            return []
        seen = self.parameters.one_hook.slot is not None
        return [slot.parameter for slot in self.parameters.slots if seen or slot.handed_over is not None]

    # -- in backward -----------------------------------------------------------------------------

    def arrived(self, slot: GradState) -> None:
        """The hook: backward has finished a gradient. Runs in backward's thread."""
        gradient = slot.parameter.grad
        if slot is self.parameters.one_hook.slot and gradient is not None:
            self._all_will_arrive(slot, gradient)
            return
        if self._collects and gradient is not None and slot.handed_over is None and slot.index >= 0:
            slot.handed_over = gradient
        elif gradient is not None:
            self._take_in(slot, gradient)
        elif self.phase is Phase.IDLE and self.parameters.looks_again:
            # There was none, or a hook of the program has taken it.
            self.refresh()

    def _take_in(self, slot: GradState, gradient: Tensor) -> None:
        """What arrives where it is not enough to note it: first of a step, too early, too late, or beside others."""
        if slot.handed_over is not None:
            # Said once: synchronize(), which the text advises, shall not complain again.
            slot.version = gradient._version
            has_stepped = self.reducers.comparison.updates > 0
            raise usage_errors.too_many_passes(slot.name, self.backward_passes_per_step, has_stepped=has_stepped)
        if not self.keep_local:
            slot.passes += 1
        if self.keep_local or slot.passes < self.backward_passes_per_step:
            if self.phase is not Phase.ACCUMULATING:
                self._begin_accumulating()
            return
        if self.phase is not Phase.REDUCING:
            self._begin_reducing()
        if slot.index < 0:
            raise usage_errors.thawed_in_backward(slot.name)
        self._collects = self.reducers.hand_over(slot, gradient) and self.backward_passes_per_step == 1

    def _all_will_arrive(self, slot: GradState, gradient: Tensor) -> None:
        """With one hook for all: a backward pass is under way; what it leaves is looked at when it has ended."""
        one_hook = self.parameters.one_hook
        if one_hook.seen is not None:
            raise usage_errors.too_many_passes(slot.name, self.backward_passes_per_step)
        if self.keep_local:
            self._begin_accumulating()
            return
        self._begin_reducing()
        if one_hook.slot is not slot:
            # The parameters have changed, and each of them has a hook again.
            self._take_in(slot, gradient)
            return
        if self.reducers.current is not None:
            self.reducers.current.mark_ready(slot.index, gradient)
        one_hook.look_at_the_end(self.parameters.tensors)

    def _begin_accumulating(self) -> None:
        # Backward runs one thread for each device.
        with self._lock:
            if self.phase is not Phase.REDUCING:
                self.phase = Phase.ACCUMULATING

    def _begin_reducing(self) -> None:
        with self._lock:
            if self.phase is not Phase.REDUCING:
                if self.reducers.is_gone() or self.parameters.may_have_changed():
                    self.refresh()
                self.phase = Phase.REDUCING

    # -- in the step -----------------------------------------------------------------------------

    def synchronize(self, call: str = "optimizer.synchronize()") -> None:
        """Reduce all gradients that have not been reduced since the last backward pass. Collective; blocks."""
        if self.phase is Phase.SYNCHRONIZED:
            return
        if self.keep_local:
            raise usage_errors.inside_no_sync(call)
        parameters = self.parameters
        if parameters.hooks.lost:
            self.reducers.take_back()
        if self.phase is not Phase.REDUCING:
            self.refresh()
        self.phase = Phase.REDUCING
        self._collects = False
        late = parameters.late_gradients() if parameters.left_out else ()
        arrived: Arrived | None = None
        if parameters.one_hook.slot is None or not self._reduce_seen():
            arrived = self._reduce()
            if reset(parameters.slots):
                parameters.look_again()
        elif parameters.holds_frozen and note_reduced(parameters.slots):
            parameters.look_again()
        self.phase = Phase.SYNCHRONIZED
        if arrived is not None and arrived.were_touched:
            self.phase = Phase.IDLE
            raise arrived.error()
        if late:
            self.phase = Phase.IDLE
            raise usage_errors.came_late(late)

    def _reduce(self) -> Arrived:
        """Reduce all gradients in place, on every rank of the set; return what they were."""
        reducers = self.reducers
        changed = reducers.changed_while_waiting() if reducers.waiting else ()
        arrived = look_at(self.parameters.slots, self.parameters.tensors, changed)
        if arrived.gradients is None:
            # A hook may be gone because its parameter was converted: look thoroughly next time.
            self.parameters.look_again()
        try:
            reducer = reducers.reduce(arrived.gradients)
            if isinstance(reducer, PlannedReducer):
                if reducers.tuner is not None:
                    reducers.tuner.step_ended(reducer)
                elif not arrived.were_exchanged:
                    self._try_one_hook(reducer, arrived)
        except BaseException:
            self.abandon()
            raise
        return arrived

    def _try_one_hook(self, reducer: PlannedReducer, arrived: Arrived) -> None:
        one_hook, slots = self.parameters.one_hook, self.parameters.slots
        if reducer.wants_marks:
            # It may have had one so far.
            one_hook.end(slots)
            return
        last = reducer.last_to_arrive
        if last is None or self.backward_passes_per_step > 1 or self.reducers.reduction.sparse_as_dense:
            return
        if one_hook.slot is None and arrived.gradients is not None:
            one_hook.begin(slots, last)

    def _reduce_seen(self) -> bool:
        """With one hook: reduce all gradients, where they are those that backward has left; False: look closely."""
        one_hook, slots = self.parameters.one_hook, self.parameters.slots
        seen, one_hook.seen = one_hook.seen, None
        gradients = list(map(gradient_of, self.parameters.tensors))
        if seen is None:
            # Backward has not reached that parameter, or there was none.
            one_hook.end(slots)
            return False
        reducer = self.reducers.current
        steady = isinstance(reducer, PlannedReducer) and reducer.is_steady
        if reducer is None or not steady or not are_those(seen, gradients):
            for slot, gradient in zip(slots, seen, strict=True):
                slot.handed_over = gradient
            return False
        try:
            for index, tensor in reducer.finish(cast("list[Tensor]", gradients)).items():
                slots[index].take_back(tensor)
            if self.reducers.divides_by_active:
                self.reducers.leave_out_joined(reducer)
        except BaseException:
            self.abandon()
            raise
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround a step of the wrapped optimizer, for which all is reduced."""
        yield
        self.reducers.comparison.updates += 1
        if self.phase is not Phase.REDUCING:
            self._begin()

    def discard(self) -> None:
        """The gradients are about to be reset, and with them local sums. Local."""
        if self.phase is Phase.REDUCING:
            raise UsageError(usage_errors.ZERO_GRAD_WHILE_REDUCING)
        self._begin()

    def _begin(self) -> None:
        if self.phase is Phase.ACCUMULATING:
            for slot in self.parameters.slots:
                slot.passes = 0
        self.phase = Phase.IDLE

    def abandon(self) -> None:
        """Forget the reducer and the step that has begun. Local."""
        self.reducers.abandon()
        reset(self.parameters.slots)
        self._collects = False
        self.phase = Phase.IDLE

    # -- what else the program calls -------------------------------------------------------------

    def prepare_for_scaler(self) -> None:
        """A GradScaler is about to look for infinities: all ranks must find the same. Collective; blocks."""
        self.synchronize("GradScaler")

    def set_passes(self, passes: int) -> None:
        """Count anew how many backward passes make a step. Local."""
        passes = check_passes(passes)
        if self.phase is Phase.REDUCING:
            raise usage_errors.changed_while_reducing("optimizer.set_backward_passes_per_step()")
        self.backward_passes_per_step = passes
        self.parameters.one_hook.end(self.parameters.slots)
        for slot in self.parameters.slots:
            slot.passes = 0
