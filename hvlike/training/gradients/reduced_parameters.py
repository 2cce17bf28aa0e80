"""Which parameters of an optimizer are reduced: their hooks, and what a program changes about them between two passes.

What the optimizer will step on is reduced: the gradients of all parameters that require one, and those that frozen ones
hold. One that was frozen since the last reduction stays for one more: passes may have left it sums, on some ranks only.
Those of lazy modules wait until they have a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from hvlike.collectives.session.context import Context, current, is_running
from hvlike.errors import UsageError
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.grad_state import GradientHooks, GradState, OneHook
from hvlike.training.gradients.parameters import ParamGroupDiff, name_parameters
from hvlike.training.gradients.reduction import Reducer, Reduction
from hvlike.training.gradients.steps_in_backward import StepWatch


class ReducedParameters:
    """The parameters of one optimizer or module, and the reducer that was made for them. All calls are local."""

    takes_any_gradient: ClassVar[bool] = True  # Also what the program has set by hand, of frozen parameters too

    def __init__(
        self,
        optimizer: Any,
        reduction: Reduction,
        names: Mapping[Tensor, str],
        on_gradient: Callable[[Any, GradState], None],
    ) -> None:
        self.reduction = reduction
        self.given_names = dict(names)  # Names from the user, also of parameters that may be added later
        self.reducer: Reducer | None = None
        self._optimizer = optimizer
        self._slots: list[GradState] = []
        self._planned: list[GradState] = []  # Those that the reducer was made for
        self._parameters: list[Tensor] = []
        self._hooks = GradientHooks(self, on_gradient, reduction.owner)
        self._hooks.take_over(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._one_hook = OneHook(self._hooks)
        self._step_watch = StepWatch(self)
        self._watch: ParamGroupDiff | None = None  # None: look thoroughly before the next reduction
        self._holds_frozen = False  # Some that are reduced are frozen
        self._left_out: list[Tensor] = []  # Frozen without a gradient, or of a lazy module that is not initialised
        self._context: Context | None = None  # That the reducer belongs to
        self._refusal: UsageError | None = None  # What steps end with: another rank may take this one for another

    def refuse(self, error: UsageError) -> None:
        """Raise this error in the next pass. Any thread."""
        self._refusal, self._watch = error, None

    def names(self) -> dict[Tensor, str]:
        """Return the parameters whose gradients are reduced, by their names. Local."""
        return {slot.parameter: slot.name for slot in self._slots}

    def _all_names(self) -> dict[Tensor, str]:
        return name_parameters(self._optimizer.param_groups, self.given_names)

    def refresh(self) -> None:
        """Follow changes of the parameter groups, of requires_grad, and of the running hvlike. Local."""
        if self._refusal is not None:
            raise self._refusal
        groups = self._optimizer.param_groups
        known = {slot.parameter: slot for slot in self._slots}
        wanted: list[Tensor] = []
        left_out: list[Tensor] = []
        for parameter in (each for group in groups for each in group["params"]):
            (wanted if self._is_reduced(parameter, known.get(parameter)) else left_out).append(parameter)
        self._left_out = left_out if self.takes_any_gradient else []
        held = [parameter for parameter in wanted if not parameter.requires_grad]
        self._holds_frozen = bool(held)
        self._watch = ParamGroupDiff(groups, self._left_out, held)
        if self._is_gone():
            self._drop_reducer()
        same = len(wanted) == len(self._slots) and all(
            slot.still_fits(parameter) for slot, parameter in zip(self._slots, wanted, strict=True)
        )
        if not same:
            self._replace_slots(wanted)
            self._slots_changed()
        for slot in self._slots:
            slot.rests = not slot.parameter.requires_grad
            self._step_watch.look_at(slot)

    def _slots_changed(self) -> None:
        self._drop_reducer()

    def _follow_changes(self) -> None:
        """See what the program has changed since the last pass. Local."""
        if self._is_gone() or self._watch is None or self._watch.sees_change(self._optimizer.param_groups):
            self.refresh()

    def _is_gone(self) -> bool:
        return self.reducer is not None and not (is_running() and current() is self._context)

    def _is_reduced(self, parameter: Tensor, slot: GradState | None) -> bool:
        if isinstance(parameter, UninitializedParameter):
            return False
        return parameter.requires_grad or parameter.grad is not None or self._stays(slot)

    def _stays(self, slot: GradState | None) -> bool:
        """Whether to reduce a frozen parameter once more; not where nothing would use up what compression remembers."""
        if slot is None or not slot.was_trained:
            return False
        return self.reduction.memory is None or slot.parameter.grad is not None

    def _replace_slots(self, parameters: list[Tensor]) -> None:
        names = self._all_names()
        self._hooks.take(parameters)
        known = {slot.parameter: slot for slot in (*self._planned, *self._slots)}
        slots = []
        for index, parameter in enumerate(parameters):
            slot = known.pop(parameter, None)
            if slot is None or not slot.still_fits(parameter):
                slot = GradState(names[parameter], parameter)
            if slot.index < 0:
                self._hooks.attach(parameter, slot)
            slot.index = index
            slots.append(slot)
        for slot in known.values():
            slot.index = -1
            self._hooks.detach(slot.parameter)
        self._slots = slots
        self._parameters = parameters

    def _late_gradients(self) -> UsageError | None:
        """Return the error for gradients that the step would use, and that came too late to be reduced with others."""
        late = [parameter for parameter in self._left_out if parameter.grad is not None]
        if not late:
            return None
        names = self._all_names()
        return usage_errors.came_late([names[each] for each in late])

    def take_back(self) -> None:
        """Reduce the parameters again that a wrapper made later has taken over, if it was not used. Local."""
        self._hooks.settle(self._all_names().__getitem__, reduces=not self.reduction.is_local(current()))
        self._one_hook.end(self._slots)
        for slot in self._slots:
            if slot.parameter not in self._hooks:
                self._hooks.attach(slot.parameter, slot)

    def _drop_reducer(self) -> None:
        self._one_hook.end(self._slots)
        reducer, self.reducer = self.reducer, None
        if reducer is not None:
            reducer.drop()
