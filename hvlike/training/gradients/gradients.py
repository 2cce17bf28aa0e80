"""The gradients of some parameters between backward and step: which have arrived, and what is reduced.

IDLE -> ACCUMULATING -> REDUCING -> SYNCHRONIZED -> IDLE      (drawn in full in optimizer/distributed.py)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.controller.tensor_queue import calling_thread
from hvlike.collectives.session.context import Context, current
from hvlike.errors import UsageError
from hvlike.system.system import system
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.grad_state import GradState, Phase, are_those, gradient_of, note_reduced, reset
from hvlike.training.gradients.parameters import Comparison, check_passes
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.training.gradients.reduced_parameters import ReducedParameters
from hvlike.training.gradients.reduction import Reducer, Reduction
from hvlike.untraced import untraced

if TYPE_CHECKING:
    from hvlike.training.autotune import Tuner
    from hvlike.training.join import Join


_handed_over: Callable[[GradState], Any] = attrgetter("handed_over")


class Gradients(ReducedParameters):
    """Reduces the gradients of an optimizer's parameters over the ranks.

    A hook counts each gradient that backward has finished and, with the last pass of a step, hands it to the reducer.
    The reducer is made for the parameters that require a gradient; when these change, it is replaced.
    """

    allows_one_hook: ClassVar[bool] = True  # Nothing but the reducer needs to know when a gradient arrives

    def __init__(
        self, optimizer: Any, reduction: Reduction, names: Mapping[Tensor, str], backward_passes_per_step: int
    ) -> None:
        super().__init__(optimizer, reduction, names, type(self).arrived)
        self.phase = Phase.IDLE
        self.keep_local = False  # Inside no_sync(): arrivals are not reduced
        self.backward_passes_per_step = check_passes(backward_passes_per_step)
        self.divides_by_active = False  # In averages; else ranks that have joined count as zeros
        self._used_in = threading.current_thread()  # The thread of the program; see `_thread`
        self.name: str | None = None  # What the ranks match this optimizer by; known from its first reduction on
        self.tuner: Tuner | None = None
        self._waiting: list[GradState] = []
        self._collects = False  # While gradients are reduced: an arrival only has to be noted
        self.comparison = Comparison(optimizer)
        self._lock = system.Lock()
        self.refresh()
        reset(self._slots)
        # The first pass looks once more: programs may add hooks after they have wrapped.
        self._watch = None

    def take_name(self) -> None:
        """Be matched between ranks by the place in their order of now, not of the first reduction. Local."""
        self._context = current()
        self.name = self._new_name(self._context)

    def _new_name(self, context: Context) -> str:
        advice = usage_errors.SEVERAL_THREADS
        return self.reduction.automatic_name(context, self, self._inside(), self.given_names, advice, self._thread())

    def _thread(self) -> threading.Thread:
        """The thread of the program in which it is used, also where autograd calls this in one of its own."""
        return calling_thread() or self._used_in

    def _inside(self) -> str:
        """What is wrapped, for names: the class of an optimizer, and its first parameter if that has a name."""
        kind = type(self._optimizer).__name__ if isinstance(self._optimizer, Optimizer) else ""
        # Of all: some may be frozen on one rank.
        first = next(iter(self._all_names().values()), "")
        return ", ".join(each for each in (kind, "" if first.startswith("noname.") else first) if each)

    def arrived(self, slot: GradState) -> None:
        """The hook: backward has finished a gradient. Runs in backward's thread."""
        gradient = slot.parameter.grad
        if slot is self._one_hook.slot and gradient is not None:
            self._all_will_arrive(slot, gradient)
            return
        if self._collects and gradient is not None and slot.handed_over is None and slot.index >= 0:
            slot.handed_over = gradient
        elif gradient is not None:
            self._take_in(slot, gradient)
        elif self._watch is None and self.phase is Phase.IDLE:
            # There was none, or a hook of the program has taken it.
            self._follow_changes()

    def _take_in(self, slot: GradState, gradient: Tensor) -> None:
        """What arrives where it is not enough to note it: first of a step, too early, too late, or beside others."""
        if slot.handed_over is not None:
            # Said once: synchronize(), which the text advises, shall not complain again.
            slot.version = gradient._version
            has_stepped = self.comparison.updates > 0
            raise usage_errors.too_many_passes(slot.name, self.backward_passes_per_step, has_stepped=has_stepped)
        if not self.keep_local:
            slot.passes += 1
            if slot.passes >= self.backward_passes_per_step:
                self._hand_over(slot, gradient)
                return
        if self.phase is not Phase.ACCUMULATING:
            self._begin_accumulating()

    def _all_will_arrive(self, slot: GradState, gradient: Tensor) -> None:
        """With one hook for all: a backward pass is under way; what it leaves is looked at when it has ended."""
        if self._one_hook.seen is not None:
            raise usage_errors.too_many_passes(slot.name, self.backward_passes_per_step)
        if self.keep_local:
            self._begin_accumulating()
            return
        self._begin_reducing()
        if self._one_hook.slot is not slot:
            # The parameters have changed, and each of them has a hook again.
            self._take_in(slot, gradient)
            return
        if self.reducer is not None:
            self.reducer.mark_ready(slot.index, gradient)
        self._one_hook.look_at_the_end(self._parameters)

    def _try_one_hook(self) -> None:
        reducer = self.reducer
        if not isinstance(reducer, PlannedReducer) or reducer.wants_marks or not self.allows_one_hook:
            # It may have had one so far.
            self._one_hook.end(self._slots)
            return
        last = reducer.last_to_arrive
        if last is None or self.backward_passes_per_step > 1 or self.reduction.sparse_as_dense:
            return
        if self._one_hook.slot is None and all(map(is_not, map(_handed_over, self._slots), repeat(None))):
            self._one_hook.begin(self._slots, last)

    def _reduce_seen(self) -> bool:
        """With one hook: reduce all gradients, where they are those that backward has left; False: look closely."""
        seen = self._one_hook.take()
        gradients = list(map(gradient_of, self._parameters))
        if seen is None:
            # Backward has not reached that parameter, or there was none.
            self._one_hook.end(self._slots)
            return False
        reducer = self.reducer
        steady = isinstance(reducer, PlannedReducer) and reducer.is_steady
        if reducer is None or not steady or not are_those(seen, gradients):
            for slot, gradient in zip(self._slots, seen, strict=True):
                slot.handed_over = gradient
            return False
        try:
            for index, tensor in reducer.finish(cast("list[Tensor]", gradients)).items():
                self._slots[index].take_back(tensor)
            if self.divides_by_active:
                self._leave_out_joined(reducer)
        except BaseException:
            self.abandon()
            raise
        return True

    def synchronize(self, call: str = "optimizer.synchronize()") -> None:
        """Reduce all gradients that have not been reduced since the last backward pass. Collective; blocks."""
        if self.phase is Phase.SYNCHRONIZED:
            return
        if self.keep_local:
            raise usage_errors.inside_no_sync(call)
        if self._hooks.lost:
            self.take_back()
        if self.phase is not Phase.REDUCING:
            self._look_before_reduction()
        self.phase = Phase.REDUCING
        self._collects = False
        late = self._late_gradients() if self._left_out else None
        disturbed: UsageError | None = None
        if self._one_hook.slot is None or not self._reduce_seen():
            disturbed = self._reduce()
            if reset(self._slots):
                self._watch = None
        elif self._holds_frozen and note_reduced(self._slots):
            self._watch = None
        self.phase = Phase.SYNCHRONIZED
        disturbed = disturbed or late
        if disturbed is not None:
            self.phase = Phase.IDLE
            raise disturbed

    def join_begins(self, *, divides_by_active: bool) -> None:
        """Have a name and a reducer before the first reduction, so that this rank can follow others. Local."""
        self.refresh()
        self._ready_reducer()
        self.divides_by_active = divides_by_active

    def join_ends(self, context: Join) -> None:
        """Go on from the reductions that this rank may have missed. Collective where some rank has; blocks."""
        self.divides_by_active = False
        if not context._absent:
            return
        mine = [slot.name for slot in self._slots if slot.was_trained]
        trained = broadcast_object(mine, context.authority, process_set=self.reduction.process_set)
        for slot in self._slots:
            slot.was_trained = slot.name in trained
            # Sums of passes before the context are gone on the ranks that have had inputs.
            slot.reached = False
        self._watch = None

    def join_fails(self) -> None:
        self.divides_by_active = False
        self.abandon()

    def discard(self) -> None:
        if self.phase is Phase.REDUCING:
            raise UsageError(usage_errors.ZERO_GRAD_WHILE_REDUCING)
        self._begin()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        yield
        self.comparison.updates += 1
        if self.phase is not Phase.REDUCING:
            self._begin()

    def prepare_for_scaler(self) -> None:
        """A GradScaler is about to look for infinities: all ranks must find the same. Collective; blocks."""
        self.synchronize("GradScaler")

    def set_passes(self, passes: int) -> None:
        passes = check_passes(passes)
        if self.phase is Phase.REDUCING:
            raise usage_errors.changed_while_reducing("optimizer.set_backward_passes_per_step()")
        self.backward_passes_per_step = passes
        self._one_hook.end(self._slots)
        for slot in self._slots:
            slot.passes = 0

    @untraced
    @contextmanager
    def local(self) -> Iterator[None]:
        if self.phase is Phase.REDUCING:
            raise UsageError(usage_errors.NO_SYNC_WHILE_REDUCING)
        before, self.keep_local = self.keep_local, True
        try:
            yield
        finally:
            self.keep_local = before

    def memory_changed(self, call: str) -> None:
        """A compressor's memory is replaced: agree with the other ranks again. `call` does that, for errors."""
        if self.phase is Phase.REDUCING:
            raise usage_errors.changed_while_reducing(call)
        self._drop_reducer()

    def _begin(self) -> None:
        if self.phase is Phase.ACCUMULATING:
            for slot in self._slots:
                slot.passes = 0
        self.phase = Phase.IDLE

    def _begin_accumulating(self) -> None:
        # Backward runs one thread for each device.
        with self._lock:
            if self.phase is not Phase.REDUCING:
                self.phase = Phase.ACCUMULATING

    def _begin_reducing(self) -> None:
        with self._lock:
            if self.phase is not Phase.REDUCING:
                self._follow_changes()
                self.phase = Phase.REDUCING

    def _hand_over(self, slot: GradState, gradient: Tensor) -> None:
        if self.phase is not Phase.REDUCING:
            self._begin_reducing()
        if slot.index < 0:
            raise UsageError(
                f"Parameter {slot.name!r} started to require a gradient between the first loss.backward() and "
                "optimizer.step(). Change requires_grad after the step, on every rank."
            )
        slot.handed_over = gradient
        if self.reducer is None:
            slot.version = gradient._version
            self._waiting.append(slot)
        else:
            self.reducer.mark_ready(slot.index, slot.to_reduce(gradient, densify=self.reduction.sparse_as_dense))
            self._collects = not self.reducer.wants_marks and self.backward_passes_per_step == 1

    def _reduce(self) -> UsageError | None:
        """Reduce all gradients in place, on every rank of the set; return the error for those exchanged meanwhile."""
        # Later steps may be under way at once, and then the library itself changes gradients. A loop that changes them
        # at the wrong place does so in its first step too.
        changed = [slot.name for slot in self._waiting if slot.was_changed]
        lost: list[str] = []
        replaced: list[str] = []
        arrived = self._all_arrived()
        if arrived is None:
            # A hook may be gone because its parameter was converted: look thoroughly next time.
            self._watch = None
            for slot in self._slots:
                if slot.handed_over is not None and slot.parameter.grad is not slot.handed_over:
                    (lost if slot.parameter.grad is None else replaced).append(slot.name)
        try:
            reducer = self._ready_reducer()
            if reducer is not None:
                missing: Sequence[int] = ()
                if arrived is None:
                    missing = [slot.index for slot in self._slots if self._is_missing(slot)]
                if arrived is None or self.reduction.sparse_as_dense:
                    arrived = [self._contribution(slot) for slot in self._slots]
                replacements = reducer.finish(arrived, missing)
                if replacements or missing or self.reduction.sparse_as_dense:
                    self._take_back(replacements, reducer.absent)
                if self.divides_by_active:
                    self._leave_out_joined(reducer)
                if self.tuner is not None and isinstance(reducer, PlannedReducer):
                    self.tuner.step_ended(reducer)
                elif not (lost or replaced):
                    self._try_one_hook()
        except BaseException:
            self.abandon()
            raise
        return usage_errors.gradients_disturbed(lost, replaced, changed) if lost or replaced or changed else None

    def _leave_out_joined(self, reducer: Reducer) -> None:
        """Make averages over all ranks, in which those that have joined count as zeros, averages over the others."""
        size = self.reduction.size(current())
        if self.reduction.op is ReduceOp.AVERAGE and 0 < reducer.active < size:
            for slot in self._slots:
                gradient = slot.parameter.grad
                if gradient is not None and slot.index not in reducer.absent:
                    gradient.mul_(size / reducer.active)

    def _all_arrived(self) -> list[Tensor] | None:
        arrived = list(map(_handed_over, self._slots))
        return arrived if are_those(arrived, map(gradient_of, self._parameters)) else None

    def _is_missing(self, slot: GradState) -> bool:
        """Whether this rank has nothing to contribute for a parameter: where no rank has, it keeps what it has."""
        return slot.handed_over is None and slot.parameter.grad is None

    def _contribution(self, slot: GradState) -> Tensor:
        """What this rank contributes for a parameter: the gradient that has arrived, else local sums, or zeros."""
        gradient = slot.parameter.grad if slot.handed_over is None else slot.handed_over
        if gradient is not None:
            return slot.to_reduce(gradient, densify=self.reduction.sparse_as_dense)
        slot.wire = slot.to_reduce(slot.nothing(), densify=self.reduction.sparse_as_dense)
        return slot.wire

    def _take_back(self, replacements: Mapping[int, Tensor], absent: Collection[int]) -> None:
        """Give the parameters what could not be reduced in place, but where their gradients were disturbed."""
        for slot in self._slots:
            if slot.index in absent or (slot.wire is None and slot.index not in replacements):
                continue
            if slot.handed_over is None or slot.parameter.grad is slot.handed_over:
                slot.take_back(replacements.get(slot.index))

    def _ready_reducer(self) -> Reducer | None:
        """Return the reducer, made at the first need; None where there is nobody to reduce with."""
        context = current()
        if self._context is not context:
            self._drop_reducer()
            self._context, self.name, self.tuner = context, None, None
        if self.reducer is None and self._slots:
            self.reducer = self._new_reducer(context)
            self._hooks.is_used = self.reducer is not None
            self._planned = self._slots
        waiting, self._waiting = self._waiting, []
        if self.reducer is not None:
            for slot in waiting:
                if slot.handed_over is not None:
                    tensor = slot.to_reduce(slot.handed_over, densify=self.reduction.sparse_as_dense)
                    self.reducer.mark_ready(slot.index, tensor)
        return self.reducer

    def _new_reducer(self, context: Context) -> Reducer | None:
        if self.reduction.is_local(context):
            return None
        if self.name is None:
            self.name = self._new_name(context)
            self.comparison.start_with({slot.name: slot.parameter for slot in self._slots})
        names = [slot.name for slot in self._slots]
        reducer = self.reduction.reducer(self.name, names, self._parameters)
        self.comparison.begin(reducer)
        if context.knobs.autotune:
            # Few programs tune: what does it is loaded for them alone.
            from hvlike.training.autotune import tune

            self.tuner = tune(self.tuner, reducer, self.name, self.reduction.process_set)
        return reducer

    def _look_before_reduction(self) -> None:
        self.refresh()

    def used_in_backward(self, slot: GradState) -> None:
        """A hook of the program has stepped on a gradient that is not reduced yet. In backward."""
        raise usage_errors.used_in_backward([slot.name])

    def has_lost(self) -> None:
        """Another wrapper reduces a parameter now. What has arrived here, and waits, is its concern. Local."""
        if self.phase is Phase.REDUCING and self.reducer is None:
            self.abandon()

    def being_reduced(self) -> list[Tensor]:
        """Return the parameters whose gradients are under way, or waited for by step(). Local."""
        if self.phase is not Phase.REDUCING:
            return []
        seen = self._one_hook.slot is not None
        return [slot.parameter for slot in self._slots if seen or slot.handed_over is not None]

    def abandon(self) -> None:
        self._drop_reducer()
        self._waiting = []
        reset(self._slots)
        self._collects = False
        self.phase = Phase.IDLE
