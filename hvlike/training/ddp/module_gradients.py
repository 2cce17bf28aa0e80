"""The gradients of a module: reduced at the end of each backward pass that comes through a synchronised forward.

    forward          outputs get a hook, unless inside no_sync()
    backward         the hook of an output arms: gradients that arrive are handed over
    its last node    what is left is reduced; then backward returns

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
from hvlike.collectives.session.context import Context
from hvlike.errors import DataParallelError, UsageError
from hvlike.training.ddp.comm_hooks import Hook, HookedReducer
from hvlike.training.ddp.end_of_backward import (
    Collected,
    EndOfBackward,
    adds_all_from,
    collection,
    is_inside_backward,
    will_reach,
)
from hvlike.training.gradients.grad_state import GradState, Phase, note_reduced
from hvlike.training.gradients.gradients import Gradients
from hvlike.training.gradients.parameters import temporary_gradients
from hvlike.training.gradients.planned_queue import IN_ONE_THREAD
from hvlike.training.gradients.reduction import Reducer, Reduction
from hvlike.training.gradients.usage_errors import (
    changed_while_reducing,
    list_names,
    unfinished,
    used_in_backward,
)
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


class ModuleGradients(Gradients):
    """Gradients that are reduced when backward() returns."""

    allows_one_hook = False
    takes_any_gradient = False

    def __init__(
        self,
        named_parameters: Mapping[str, Tensor],
        reduction: Reduction,
        *,
        find_unused: bool = False,
        static_graph: bool = False,
    ) -> None:
        """With `find_unused` gradients stay that no rank has used; `static_graph`: every iteration uses the same."""
        self.static_graph = static_graph
        self.find_unused = find_unused or static_graph
        self._pending = False  # A synchronised forward was made, and no backward pass of it has reduced yet
        self._uses_own = True  # Such a forward has used the module's own parameters
        self._may_hold_sums = False  # Of forwards in no_sync() since the last reduction: the same on all ranks
        self._under_way = False  # A backward pass that reduces has begun and not ended
        self._collection: Collected | None = None  # Of the pass under way, unless into `.grad`
        self._missing: dict[GradState, None] | None = None  # Not reached since the last synchronised forward
        self._expected: dict[GradState, int] = {}  # How often each arrives in a static graph
        self._twice: list[str] = []
        self._used: list[str] = []  # By hooks of the program, before they were reduced
        self.hook: Hook | None = None  # The user's communication hook
        self.hook_state: Any = None
        self._end = EndOfBackward(weakref.WeakMethod(self._ended))
        self._arm = partial(_output_is_reached, weakref.ref(self))
        groups = [{"params": list(named_parameters.values())}]
        names = {parameter: name for name, parameter in named_parameters.items()}
        super().__init__(SimpleNamespace(param_groups=groups), reduction, names, 1)
        self._hooks.shares = True

    def _new_name(self, context: Context) -> str:
        # Of two models of one class all names are the same.
        return self.reduction.automatic_name(context, self, self._inside(), {}, IN_ONE_THREAD, self._thread())

    def set_static_graph(self) -> None:
        if self._pending or self._under_way or self._missing is not None or self.reducer is not None:
            raise DataParallelError(
                "_set_static_graph() was called after the first forward: whether a graph is static is known before it. "
                "Call it right after the constructor, or pass static_graph=True to DistributedDataParallel."
            )
        self.static_graph = self.find_unused = True

    @property
    def trains(self) -> bool:
        """Whether some parameter requires a gradient; else no backward pass reduces."""
        return not all(slot.rests for slot in self._slots)

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
        if self._under_way and self._is_gone():
            # No other rank waits for the rest: hvlike was started anew.
            self.abandon()
        ended = not self._under_way
        if not ended:
            # What the program has done with gradients since then matters as little as what was left of the pass.
            with suppress(UsageError):
                self._complete()
        if self.name is None:
            # Backward, which takes the name, may run in threads of autograd.
            self._used_in = self._thread()
        missing, self._missing = self._missing, None
        if self._hooks.lost:
            super().take_back()
            self._end.take_turn()
        self._look()
        self._uses_own = not stands_in or (self._uses_own and self._pending)
        self._pending = True
        if (missing and not self.find_unused) or not ended:
            raise unfinished([slot.name for slot in missing or ()], rank(), interrupted=not ended)

    def after_forward(self, output: Any, *, synchronised: bool) -> None:
        self._look()
        if not synchronised:
            return
        tensor: Any
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._arm)

    def arrived(self, slot: GradState) -> None:
        """The hook: backward has finished a gradient, or with a static graph one of several parts of it."""
        if collection() is not None:
            slot.reached = True
            self._is_reducing()
            return
        if self.static_graph and self._is_reducing():
            slot.passes += 1
            if slot.passes < self._expected.get(slot, 0) or slot not in self._expected:
                return
        super().arrived(slot)

    def _take_in(self, slot: GradState, gradient: Tensor) -> None:
        if not self._is_reducing():
            slot.reached = True
        elif slot.handed_over is not None:
            # An error only when the pass has ended, so that other ranks do not wait for ever.
            self._twice.append(slot.name)
        elif slot.index >= 0:
            self._hand_over(slot, gradient)

    def _look(self) -> None:
        """Before and after forward: it makes the graph of the parameters that require a gradient then. Local."""
        if not (self._under_way or is_inside_backward()):
            super()._follow_changes()

    def _slots_changed(self) -> None:
        """Keep the plan: forwards that reduce nothing may run on one rank alone, and see changes that do not last."""

    def _follow_changes(self) -> None:
        """When a pass reduces: what the program changes after its forward is not in the graph. Local."""
        same = len(self._slots) == len(self._planned) and all(map(is_, self._slots, self._planned))
        if not same or self._is_gone():
            self._drop_reducer()

    def _look_before_reduction(self) -> None:
        self._follow_changes()

    def _is_reduced(self, parameter: Tensor, slot: GradState | None) -> bool:
        """What a program sets by hand is its own concern, as with any module."""
        holds_sums = slot is not None and slot.reached and parameter.grad is not None
        return parameter.requires_grad or holds_sums or self._stays(slot)

    def _replace_slots(self, parameters: list[Tensor]) -> None:
        known = set(self._slots)
        super()._replace_slots(parameters)
        for slot in self._slots:
            # Nobody has seen where that gradient comes from: it may be this rank's own.
            slot.reached = slot.reached or (slot not in known and slot.parameter.grad is not None)
        self._expected = {}

    def _is_reducing(self) -> bool:
        """Whether the backward pass under way reduces; its first arrival may come before any output's hook."""
        if not self._end.armed:
            if not self._pending:
                return False
            self.arm()
        self._under_way = True
        return self._end.armed

    def arm(self) -> None:
        """A pass comes through an output: it reduces if it adds to `.grad`, as autograd.grad() does not."""
        elsewhere = collection()
        if self._end.armed or (elsewhere is not None and self._collection is elsewhere):
            return
        if self._under_way:
            # An earlier pass has failed half way: other ranks may wait for the rest.
            self._complete()
        self._collection = elsewhere
        if elsewhere is None:
            self._end.arm()
            # If it fails before a gradient arrives, other ranks may wait. Reentrant checkpoints show no parameter here.
            trained = next((slot for slot in reversed(self._slots) if not slot.rests), None)
            node = None if trained is None else self._hooks.node(trained.parameter)
            self._under_way = node is not None and will_reach(node)
        else:
            self._under_way = True
            elsewhere[self._end.number] = partial(self._reduce_in, elsewhere.gradients)

    def _reduce_in(self, gradients: dict[Tensor, Tensor]) -> None:
        parameters: list[Tensor] = self._optimizer.param_groups[0]["params"]
        with temporary_gradients({parameter: gradients.get(parameter) for parameter in parameters}):
            try:
                self._ended(None)
            finally:
                gradients.update((each, each.grad) for each in parameters if each.grad is not None)

    def _ended(self, output: Any) -> None:
        """The pass has ended; `output` is the node through which it has come. Collective where it reduces; blocks."""
        if not self._under_way:
            # Not by what has arrived on this rank: all ranks must decide alike.
            concerned = self._uses_own and (self._may_hold_sums or self.trains)
            if not (concerned and output is not None and adds_all_from(output)):
                return
        twice = self._complete()
        used, self._used = self._used, []
        if used:
            raise used_in_backward(used)
        if not twice:
            return
        names = list_names(twice)
        if self.static_graph:
            text = (
                "Your training graph has changed in this iteration, which is not compatible with static_graph=True: "
                f"the gradients of {names} have arrived more often than in the first one. Pass static_graph=False to "
                "DistributedDataParallel."
            )
        else:
            text = (
                f"Expected to mark a variable ready only once. The gradients of {names} have arrived several times in "
                "one backward pass: parameters that are used in several reentrant checkpoints do so. Pass "
                "static_graph=True to DistributedDataParallel if every iteration uses them in the same way, or "
                "use_reentrant=False to the checkpoints."
            )
        raise DataParallelError(f"{text} The reduction was completed, so all ranks can go on with the next iteration.")

    def _complete(self) -> list[str]:
        """Reduce all gradients; return the names of those that have arrived too often."""
        self._pending = self._under_way = self._may_hold_sums = False
        self._collection = None
        twice, self._twice = self._twice, []
        try:
            self.synchronize("backward()")
        except UsageError:
            # A gradient that has arrived twice has also changed since its first arrival.
            if not twice:
                raise
        finally:
            self.phase = Phase.IDLE
        return list(dict.fromkeys(twice))

    def _all_arrived(self) -> list[Tensor] | None:
        arrived = super()._all_arrived()
        unreached: dict[GradState, None] = {}
        if arrived is None:
            # What was frozen since forward accumulates nothing.
            trained = (each for each in self._slots if each.parameter.requires_grad and not each.rests)
            unreached = {each: None for each in trained if not self._is_reached(each)}
        if self._missing is not None:
            unreached = {slot: None for slot in self._missing if slot in unreached}
        self._missing = unreached
        if self.static_graph and not self._expected:
            self._expected = {slot: slot.passes for slot in self._slots if slot.passes}
        return arrived

    def _contribution(self, slot: GradState) -> Tensor:
        if not self.find_unused or self._is_reached(slot):
            return super()._contribution(slot)
        # A copy: the gradient itself stays as it is if no rank has used the parameter.
        gradient = slot.parameter.grad
        slot.wire = slot.nothing() if gradient is None else gradient.detach().clone()
        return slot.wire

    def _is_reached(self, slot: GradState) -> bool:
        if slot.handed_over is not None or slot.reached or slot.passes > 0:
            return True
        # The hook is that of another module, which shares the parameter.
        return bool(self._hooks.lost) and id(slot.parameter) in self._hooks.lost

    def take_back(self) -> None:
        """At the end of backward. A module whose forward came later, and which shares parameters, has reduced them."""
        if not self._hooks.lost_to_sharers:
            super().take_back()

    def used_in_backward(self, slot: GradState) -> None:
        """Noted: an error only when a pass that reduces has ended, so that other ranks do not wait for ever."""
        if slot.name not in self._used:
            self._used.append(slot.name)

    def _is_missing(self, slot: GradState) -> bool:
        return super()._is_missing(slot) or (self.find_unused and not self._is_reached(slot))

    def reduce_by(self, compression: CompressorLike | None, hook: Hook | None, state: Any) -> None:
        if self._under_way:
            raise changed_while_reducing("register_comm_hook()")
        if compression is not None:
            self.reduction = replace(self.reduction, compression=compression)
        self.hook = hook
        self.hook_state = state
        self._hooks.shares = hook is None
        self._drop_reducer()

    def reduce_zeros(self) -> None:
        self._look()
        self._follow_changes()
        reducer = self._ready_reducer()
        if reducer is not None:
            reducer.finish([slot.nothing() for slot in self._slots], range(len(self._slots)))
        if note_reduced(self._slots):
            self._watch = None

    def _new_reducer(self, context: Context) -> Reducer | None:
        reducer: Reducer | None = None
        if self.hook is None:
            reducer = super()._new_reducer(context)
        else:
            if self.name is None:
                self.name = self._new_name(context)
            where, size = self.reduction.process_set, self.reduction.bucket_bytes
            reducer = HookedReducer(self.name, self._parameters, self.hook, self.hook_state, where, size)
        return reducer

    def join_ends(self, context: Join) -> None:
        super().join_ends(context)
        # What the ranks with inputs have reduced, others may have had sums for.
        self._may_hold_sums = self._may_hold_sums and not context._absent

    def abandon(self) -> None:
        super().abandon()
        self._missing = None
        self._pending = self._under_way = self._may_hold_sums = False
        self._twice, self._used = [], []


@untraced
def _output_is_reached(reference: weakref.ref[ModuleGradients], _: Tensor) -> None:
    """The hook of outputs. A graph may keep it, so it holds the gradients weakly."""
    owner = reference()
    if owner is not None:
        owner.arm()
