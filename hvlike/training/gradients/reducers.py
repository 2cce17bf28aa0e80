"""The reducers of one optimizer or module, one after another, under the name by which the ranks match it.

    none       before the first reduction, and after a change: parameters, another hvlike
      |  ready(): collective only when the reducer agrees, in its first step
    current    made for the parameters of now; a gradient that arrives is marked ready
      |  drop()
    none

What arrives while there is none waits for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.controller.tensor_queue import calling_thread
from hvlike.collectives.session.context import Context, current, is_running
from hvlike.training.gradients.contributions import contributions, lacking, take_back
from hvlike.training.gradients.grad_state import GradState
from hvlike.training.gradients.parameters import Comparison
from hvlike.training.gradients.reduced_parameters import ReducedParameters
from hvlike.training.gradients.reduction import Reducer, Reduction

if TYPE_CHECKING:
    from hvlike.training.autotune import Tuner
    from hvlike.training.join import Join

Factory = Callable[[str, Sequence[Tensor], Reduction], Reducer]


class Reducers:
    """Has the name, the settings and the reducer of an owner. Calls are local but where they say otherwise."""

    def __init__(
        self, parameters: ReducedParameters, reduction: Reduction, advice: str, told_apart_by: Mapping[Tensor, str]
    ) -> None:
        """advice: for errors, where two threads have such owners, unless the names in `told_apart_by` differ."""
        self.reduction = reduction
        self.current: Reducer | None = None
        self.name: str | None = None  # What the ranks match the owner by; known from its first reduction on
        self.waiting: list[GradState] = []  # Have arrived before there was a reducer
        self.make: Factory | None = None  # In place of the planned reducer
        self.divides_by_active = False  # In averages; else ranks that have joined count as zeros
        self.tuner: Tuner | None = None
        self.comparison = Comparison(parameters.optimizer)
        self._parameters = parameters
        self._advice = advice
        self._told_apart_by = told_apart_by
        self._context: Context | None = None  # That the reducer belongs to
        self._used_in = threading.current_thread()  # The thread of the program

    def take_name(self) -> None:
        """Be matched between ranks by the place in their order of now, not of the first reduction."""
        self._context = current()
        self.name = self._new_name(self._context)

    def note_thread(self) -> None:
        """Remember the thread of the program that uses the owner now: autograd may call in one of its own."""
        self._used_in = calling_thread() or self._used_in

    def _new_name(self, context: Context) -> str:
        thread = calling_thread() or self._used_in
        return self.reduction.automatic_name(
            context, self._parameters, self._inside(), self._told_apart_by, self._advice, thread
        )

    def _inside(self) -> str:
        """Return what is wrapped, for names: the class of an optimizer, and its first parameter if that has a name."""
        optimizer = self._parameters.optimizer
        kind = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else ""
        # Of all: some may be frozen on one rank.
        first = next(iter(self._parameters.all_names().values()), "")
        return ", ".join(part for part in (kind, "" if first.startswith("noname.") else first) if part)

    def keeps(self, slot: GradState | None) -> bool:
        """Whether to reduce a frozen parameter once more."""
        return slot is not None and slot.was_trained

    def is_gone(self) -> bool:
        """Whether the reducer belongs to an hvlike that has ended."""
        return self.current is not None and not (is_running() and current() is self._context)

    def take_back(self) -> None:
        """Reduce the parameters again that a wrapper made later has taken over, if it was not used."""
        self._parameters.take_back(reduces=not self.reduction.is_local(current()))

    def ready(self) -> Reducer | None:
        """Return the reducer, made at the first need; None where there is nobody to reduce with."""
        context = current()
        if self._context is not context:
            self.drop()
            self._context, self.name, self.tuner = context, None, None
        parameters = self._parameters
        if self.current is None and parameters.slots:
            self.current = self._new(context)
            parameters.hooks.is_used = self.current is not None
            parameters.planned = parameters.slots
        waiting, self.waiting = self.waiting, []
        if self.current is not None:
            for slot in waiting:
                if slot.handed_over is not None:
                    self.hand_over(slot, slot.handed_over)
        return self.current

    def _new(self, context: Context) -> Reducer | None:
        if self.make is None and self.reduction.is_local(context):
            return None
        slots, tensors = self._parameters.slots, self._parameters.tensors
        unnamed = self.name is None
        name = self.name = self._new_name(context) if self.name is None else self.name
        if self.make is not None:
            return self.make(name, tensors, self.reduction)
        if unnamed:
            self.comparison.start_with({slot.name: slot.parameter for slot in slots})
        reducer = self.reduction.reducer(name, [slot.name for slot in slots], tensors)
        self.comparison.begin(reducer)
        if context.knobs.autotune:
            # Few programs tune: what does it is loaded for them alone.
            from hvlike.training.autotune import tune

            self.tuner = tune(self.tuner, reducer, name, self.reduction.process_set)
        return reducer

    def hand_over(self, slot: GradState, gradient: Tensor) -> bool:
        """Take a gradient that is final for this step; return whether others only have to be noted from now on."""
        slot.handed_over = gradient
        reducer = self.current
        if reducer is None:
            slot.version = gradient._version
            self.waiting.append(slot)
            return False
        reducer.mark_ready(slot.index, slot.to_reduce(gradient, densify=self.reduction.sparse_as_dense))
        return not reducer.wants_marks

    def changed_while_waiting(self) -> list[str]:
        """Return the names of the gradients that the program has changed in place since they have arrived."""
        # Later steps may be under way at once, and then the library itself changes gradients. A loop that changes them
        # at the wrong place does so in its first step too.
        return [slot.name for slot in self.waiting if slot.was_changed]

    def reduce(self, arrived: list[Tensor] | None, unused: Collection[GradState] = ()) -> Reducer | None:
        """Reduce all gradients in place, on every rank of the set; return what has done so. Collective; blocks.

        arrived: all gradients, where each has arrived; else None. unused: those that no pass has used, and that stay
        where no rank has used them.
        """
        reducer, densify = self.ready(), self.reduction.sparse_as_dense
        if reducer is None:
            return None
        slots = self._parameters.slots
        missing: Sequence[int] = () if arrived is not None else lacking(slots, unused)
        if arrived is None or densify:
            arrived = contributions(slots, unused, densify=densify)
        replacements = reducer.finish(arrived, missing)
        if replacements or missing or densify:
            take_back(slots, replacements, reducer.absent)
        if self.divides_by_active:
            self.leave_out_joined(reducer)
        return reducer

    def leave_out_joined(self, reducer: Reducer) -> None:
        """Make averages over all ranks, in which those that have joined count as zeros, averages over the others."""
        size = self.reduction.size(current())
        if self.reduction.op is ReduceOp.AVERAGE and 0 < reducer.active < size:
            for slot in self._parameters.slots:
                gradient = slot.parameter.grad
                if gradient is not None and slot.index not in reducer.absent:
                    gradient.mul_(size / reducer.active)

    def join_begins(self, *, divides_by_active: bool) -> None:
        """Have a name and a reducer before the first reduction, so that this rank can follow others."""
        self.ready()
        self.divides_by_active = divides_by_active

    def join_ends(self, context: Join) -> None:
        """Go on from the reductions that this rank may have missed. Collective where some rank has; blocks."""
        self.divides_by_active = False
        if not context._absent:
            return
        slots = self._parameters.slots
        mine = [slot.name for slot in slots if slot.was_trained]
        trained = broadcast_object(mine, context.authority, process_set=self.reduction.process_set)
        for slot in slots:
            slot.was_trained = slot.name in trained
            # Sums of passes before the context are gone on the ranks that have had inputs.
            slot.reached = False
        self._parameters.look_again()

    def drop(self) -> None:
        """Forget the reducer, and what the ranks have agreed on."""
        self._parameters.one_hook.end(self._parameters.slots)
        reducer, self.current = self.current, None
        if reducer is not None:
            reducer.drop()

    def abandon(self) -> None:
        """Drop the reducer and the step that has begun."""
        self.drop()
        self.waiting = []
