"""The gradients of a module: reduced at the end of each backward pass that comes through a synchronised forward.

    forward          outputs get a hook, unless inside no_sync()
    backward         the hook of an output, or the first gradient, makes a ModulePass: gradients are handed over
    its last node    what is left is reduced, and the pass is gone; then backward returns

A pass that has failed stays until the next forward or pass, which completes it: other ranks may wait for the rest.

No graph is searched for unused parameters: they are those that have not arrived when backward has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvlike.collectives.compression import CompressorLike
from hvlike.collectives.session.basics import rank
from hvlike.errors import DataParallelError, UsageError
from hvlike.system.system import system
from hvlike.training.ddp.comm_hooks import Hook, hooked_reducer
from hvlike.training.ddp.end_of_backward import (
    ModulePass,
    adds_all_here,
    collection,
    is_inside_backward,
    next_number,
    next_turn,
    will_reach,
)
from hvlike.training.gradients.contributions import Arrived, look_at
from hvlike.training.gradients.grad_state import GradState, note_reduced, reset
from hvlike.training.gradients.parameters import temporary_gradients
from hvlike.training.gradients.planned_queue import IN_ONE_THREAD
from hvlike.training.gradients.reduced_parameters import ReducedParameters
from hvlike.training.gradients.reducers import Reducers
from hvlike.training.gradients.reduction import Reduction
from hvlike.training.gradients.usage_errors import arrived_twice, changed_while_reducing, unfinished, used_in_backward
from hvlike.untraced import untraced

if TYPE_CHECKING:
    from hvlike.training.join import Join


def tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name, None))


class ModuleGradients:
    """Gradients that are reduced when backward() returns."""

    def __init__(
        self,
        named_parameters: Mapping[str, Tensor],
        reduction: Reduction,
        *,
        find_unused: bool = False,
        static_graph: bool = False,
    ) -> None:
        """With `find_unused` gradients stay that no rank has used; `static_graph`: every iteration uses the same."""
        groups = SimpleNamespace(param_groups=[{"params": list(named_parameters.values())}])
        names = {parameter: name for name, parameter in named_parameters.items()}
        self.parameters = ReducedParameters(
            self, groups, reduction.owner, names, ModuleGradients.arrived, takes_any_gradient=False
        )
        self.parameters.hooks.shares = True
        # Of two models of one class all names are the same.
        self.reducers = Reducers(self.parameters, reduction, IN_ONE_THREAD, {})
        self.find_unused = find_unused or static_graph
        self.comm_hook: tuple[Hook, Any] | None = None  # The user's communication hook, with its state
        self._pass: ModulePass | None = None  # The one under way
        self._pending = False  # A synchronised forward was made, and no backward pass of it has reduced yet
        self._uses_own = True  # Such a forward has used the module's own parameters
        self._may_hold_sums = False  # Of forwards in no_sync() since the last reduction: the same on all ranks
        self._missing: dict[GradState, None] | None = None  # Not reached since the last synchronised forward
        self._expected: dict[GradState, int] | None = {} if static_graph else None  # How often each arrives, if always
        self._used: list[str] = []  # By hooks of the program, before they were reduced
        self._number = next_number()
        self._lock = system.Lock()
        self._refresh()
        reset(self.parameters.slots)
        # The first pass looks once more: programs may add hooks after they have wrapped.
        self.parameters.look_again()

    def set_static_graph(self) -> None:
        """Let every iteration use the parameters alike. Before the first forward. Local."""
        began = self._pending or self._is_under_way or self._missing is not None
        if began or self.reducers.current is not None:
            raise DataParallelError(
                "_set_static_graph() was called after the first forward: whether a graph is static is known before it. "
                "Call it right after the constructor, or pass static_graph=True to DistributedDataParallel."
            )
        self.find_unused, self._expected = True, {}

    @property
    def trains(self) -> bool:
        """Whether some parameter requires a gradient; else no backward pass reduces."""
        return not all(slot.rests for slot in self.parameters.slots)

    @property
    def _is_under_way(self) -> bool:
        """Whether a backward pass that reduces has begun and not ended."""
        return self._pass is not None and self._pass.reduces

    # -- forward ---------------------------------------------------------------------------------

    def before_forward(self, *, synchronised: bool, stands_in: bool) -> None:
        """Begin a forward that trains. Collective where the last backward failed, if it is synchronised; else local.

        stands_in: other tensors stand for the parameters (torch.func.functional_call).
        """
        if not synchronised:
            # A forward before it whose output was not differentiated makes nothing of this one's pass.
            self._pending = False
            self._look()
            self._may_hold_sums = self._may_hold_sums or self.trains
            return
        running = self._pass
        interrupted = running is not None and running.reduces and self._complete_interrupted()
        if self.reducers.name is None:
            # Backward, which takes the name, may run in threads of autograd.
            self.reducers.note_thread()
        missing, self._missing = self._missing, None
        if self.parameters.hooks.lost:
            self.reducers.take_back()
            self._number = next_turn()
        self._look()
        self._uses_own = not stands_in or (self._uses_own and self._pending)
        self._pending = True
        if (missing and not self.find_unused) or interrupted:
            raise unfinished([slot.name for slot in missing or ()], rank(), interrupted=interrupted)

    def _complete_interrupted(self) -> bool:
        """Complete a pass that has failed half way; return whether other ranks may have waited. Collective then."""
        if self.reducers.is_gone():
            # No other rank waits for the rest: hvlike was started anew.
            self.abandon()
            return False
        # What the program has done with gradients since then matters as little as what was left of the pass.
        with suppress(UsageError):
            self._complete()
        return True

    def after_forward(self, output: Any, *, synchronised: bool) -> None:
        """Have passes through these outputs reduce, where the forward is synchronised. Local."""
        self._look()
        if not synchronised:
            return
        arm = partial(_output_is_reached, weakref.ref(self))
        tensor: Any
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(arm)

    def _look(self) -> None:
        """Before and after forward: it makes the graph of the parameters that require a gradient then. Local."""
        running = self._pass
        if (running is not None and running.reduces) or is_inside_backward():
            return
        if self.reducers.is_gone() or self.parameters.may_have_changed():
            self._refresh()

    def _refresh(self) -> None:
        """Follow the program's changes. Local.

        The plan stays: forwards that reduce nothing may run on one rank alone, and see changes that do not last.
        """
        parameters, known = self.parameters, set(self.parameters.slots)
        has_changed = parameters.refresh(self._is_reduced)
        if self.reducers.is_gone():
            self.reducers.drop()
        if has_changed:
            for slot in parameters.slots:
                # Nobody has seen where that gradient comes from: it may be this rank's own.
                slot.reached = slot.reached or (slot not in known and slot.parameter.grad is not None)
            self._expected = None if self._expected is None else {}
        parameters.note_frozen()

    def _is_reduced(self, parameter: Tensor, slot: GradState | None) -> bool:
        """What a program sets by hand is its own concern, as with any module."""
        holds_sums = slot is not None and slot.reached and parameter.grad is not None
        return parameter.requires_grad or holds_sums or self.reducers.keeps(slot)

    # -- backward --------------------------------------------------------------------------------

    def arrived(self, slot: GradState) -> None:
        """The hook: backward has finished a gradient, or with a static graph one of several parts of it."""
        if collection() is not None:
            slot.reached = True
            self._is_reducing()
            return
        if self._expected is not None and self._is_reducing():
            slot.passes += 1
            if slot.passes < self._expected.get(slot, 0) or slot not in self._expected:
                return
        gradient, running = slot.parameter.grad, self._pass
        if gradient is None:
            # There was none, or a hook of the program has taken it.
            return
        if running is not None and running.collects and slot.handed_over is None and slot.index >= 0:
            slot.handed_over = gradient
        else:
            self._take_in(slot, gradient)

    def _take_in(self, slot: GradState, gradient: Tensor) -> None:
        """What arrives where it is not enough to note it."""
        running = self._is_reducing()
        if running is None:
            slot.reached = True
        elif slot.handed_over is not None:
            # An error only when the pass has ended, so that other ranks do not wait for ever.
            running.twice.append(slot.name)
        elif slot.index >= 0:
            if not running.has_begun:
                self._begin_reducing(running)
            running.collects = self.reducers.hand_over(slot, gradient)

    def _is_reducing(self) -> ModulePass | None:
        """Return the pass under way if it reduces into `.grad`; its first arrival may come before any output's hook."""
        running = self._pass
        if running is None or not running.armed:
            if not self._pending:
                return None
            running = self.arm()
        running.reduces = True
        return running if running.armed else None

    def arm(self) -> ModulePass:
        """A pass comes through an output: it reduces if it adds to `.grad`, as autograd.grad() does not."""
        collected, running = collection(), self._pass
        if running is not None and running.sees(collected):
            return running
        # Backward runs one thread for each device.
        with self._lock:
            running = self._pass
            if running is not None and running.sees(collected):
                return running
            if self._is_under_way:
                # An earlier pass has failed half way: other ranks may wait for the rest.
                self._complete()
            running = self._pass = ModulePass(collected)
            if collected is not None:
                collected[self._number] = partial(self._reduce_in, collected.gradients)
                return running
            running.call_at_end(self._number, partial(_pass_has_ended, weakref.ref(self)))
            # If it fails before a gradient arrives, other ranks may wait, also where this rank does not use the last
            # parameter, or none. Reentrant checkpoints show none here.
            trained = (slot.parameter for slot in reversed(self.parameters.slots) if not slot.rests)
            nodes = map(self.parameters.hooks.node, trained)
            running.reduces = any(node is not None and will_reach(node) for node in nodes) or (
                self._uses_own and (self._may_hold_sums or self.trains) and adds_all_here()
            )
            return running

    def _begin_reducing(self, running: ModulePass) -> None:
        with self._lock:
            if not running.has_begun:
                self._follow_changes()
                running.has_begun = True

    def _follow_changes(self) -> None:
        """When a pass reduces: what the program changes after its forward is not in the graph. Local."""
        slots, planned = self.parameters.slots, self.parameters.planned
        same = len(slots) == len(planned) and all(map(is_, slots, planned))
        if not same or self.reducers.is_gone():
            self.reducers.drop()

    def used_in_backward(self, slot: GradState) -> None:
        """Noted: an error only when a pass that reduces has ended, so that other ranks do not wait for ever."""
        if slot.name not in self._used:
            self._used.append(slot.name)

    def has_lost(self) -> None:
        """Another wrapper reduces a parameter now. What has arrived here, and waits, is its concern. Local."""
        if self._pass is not None and self._pass.has_begun and self.reducers.current is None:
            self.abandon()

    # -- the end of a pass -----------------------------------------------------------------------

    def _reduce_in(self, gradients: dict[Tensor, Tensor]) -> None:
        parameters: list[Tensor] = self.parameters.optimizer.param_groups[0]["params"]
        with temporary_gradients({parameter: gradients.get(parameter) for parameter in parameters}):
            try:
                self.end()
            finally:
                gradients.update((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)

    def end(self) -> None:
        """The pass has ended. Collective where it reduces; blocks."""
        if not self._is_under_way:
            self._pass = None
            return
        twice = self._complete()
        used, self._used = self._used, []
        if used:
            raise used_in_backward(used)
        if twice:
            raise arrived_twice(twice, static_graph=self._expected is not None)

    def _complete(self) -> list[str]:
        """Reduce all gradients; return the names of those that have arrived too often."""
        ended, self._pass = self._pass, None
        self._pending = self._may_hold_sums = False
        twice = [] if ended is None else list(dict.fromkeys(ended.twice))
        if self.parameters.hooks.lost and not self.parameters.hooks.lost_to_sharers:
            self.reducers.take_back()
        if ended is None or not ended.has_begun:
            self._follow_changes()
        arrived = self._reduce()
        if reset(self.parameters.slots):
            self.parameters.look_again()
        # A gradient that has arrived twice has also changed since its first arrival.
        if arrived.were_touched and not twice:
            raise arrived.error()
        return twice

    def _reduce(self) -> Arrived:
        """Reduce all gradients in place, on every rank of the set; return what they were."""
        parameters, reducers = self.parameters, self.reducers
        changed = reducers.changed_while_waiting() if reducers.waiting else ()
        arrived = look_at(parameters.slots, parameters.tensors, changed)
        unused: list[GradState] = []
        if arrived.gradients is not None:
            self._missing = {}
        else:
            unused = self._find_unused()
            # A hook may be gone because its parameter was converted: look thoroughly next time.
            parameters.look_again()
        if self._expected is not None and not self._expected:
            self._expected = {slot: slot.passes for slot in parameters.slots if slot.passes}
        try:
            reducers.reduce(arrived.gradients, set(unused) if self.find_unused else ())
        except BaseException:
            self.abandon()
            raise
        return arrived

    def _find_unused(self) -> list[GradState]:
        """Return what no pass has reached since the last reduction; the next forward may refuse to go on with that."""
        unused = [slot for slot in self.parameters.slots if not self._is_reached(slot)]
        # What was frozen since forward accumulates nothing.
        missing = {slot: None for slot in unused if slot.parameter.requires_grad and not slot.rests}
        if self._missing is not None:
            missing = {slot: None for slot in self._missing if slot in missing}
        self._missing = missing
        return unused

    def _is_reached(self, slot: GradState) -> bool:
        if slot.handed_over is not None or slot.reached or slot.passes > 0:
            return True
        # The hook is that of another module, which shares the parameter.
        lost = self.parameters.hooks.lost
        return bool(lost) and id(slot.parameter) in lost

    # -- what else the program calls -------------------------------------------------------------

    def reduce_by(self, compression: CompressorLike | None, hook: Hook | None, state: Any) -> None:
        """Reduce by a compression or a hook from now on. Local."""
        if self._is_under_way:
            raise changed_while_reducing("register_comm_hook()")
        reducers = self.reducers
        if compression is not None:
            reducers.reduction = replace(reducers.reduction, compression=compression)
        self.comm_hook = None if hook is None else (hook, state)
        reducers.make = None if hook is None else partial(hooked_reducer, hook, state)
        self.parameters.hooks.shares = hook is None
        reducers.drop()

    def reduce_zeros(self) -> None:
        """Take part in a reduction by hooks for which this rank, out of data, has nothing. Collective; blocks."""
        self._look()
        self._follow_changes()
        reducer, slots = self.reducers.ready(), self.parameters.slots
        if reducer is not None:
            reducer.finish([slot.nothing() for slot in slots], range(len(slots)))
        if note_reduced(slots):
            self.parameters.look_again()

    def join_begins(self, *, divides_by_active: bool) -> None:
        """Have a name and a reducer before the first reduction, so that this rank can follow others. Local."""
        self._refresh()
        self.reducers.join_begins(divides_by_active=divides_by_active)

    def join_ends(self, context: Join) -> None:
        """Go on from the reductions that this rank may have missed. Collective where some rank has; blocks."""
        self.reducers.join_ends(context)
        # What the ranks with inputs have reduced, others may have had sums for.
        self._may_hold_sums = self._may_hold_sums and not context._absent

    def abandon(self) -> None:
        """Forget the reducer, the pass under way, and what forwards have left to do. Local."""
        self.reducers.abandon()
        reset(self.parameters.slots)
        self._pass = self._missing = None
        self._pending = self._may_hold_sums = False
        self._used = []


@untraced
def _output_is_reached(reference: weakref.ref[ModuleGradients], _: Tensor) -> None:
    """The hook of outputs. A graph may keep it, so it holds the gradients weakly."""
    owner = reference()
    if owner is not None:
        owner.arm()


@untraced
def _pass_has_ended(reference: weakref.ref[ModuleGradients]) -> None:
    owner = reference()
    if owner is not None:
        owner.end()
