"""Which parameters of an optimizer are reduced: their hooks, and what a program changes about them between two passes.

What the optimizer will step on is reduced: the gradients of all parameters that require one, and those that frozen ones
hold. One that was frozen since the last reduction stays for one more: passes may have left it sums, on some ranks only.
Those of lazy modules wait until they have a shape. Modules and Adasum have rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from hvlike.errors import UsageError
from hvlike.training.gradients.grad_state import GradientHooks, GradState, OneHook
from hvlike.training.gradients.parameters import ParamGroupDiff, name_parameters
from hvlike.training.gradients.steps_in_backward import StepWatch

Rule = Callable[[Tensor, GradState | None], bool]  # Whether a parameter, with the state it has had so far, is reduced


class ReducedParameters:
    """The parameters of one optimizer or module. It is what has a name among the ranks. All calls are local.

    Its owner follows changes in two calls: `refresh`, after which it may have to drop its reducer, then `note_frozen`.
    """

    def __init__(
        self,
        owner: Any,
        optimizer: Any,
        wrapper: str,
        names: Mapping[Tensor, str],
        on_gradient: Callable[[Any, GradState], None],
        *,
        takes_any_gradient: bool = True,
    ) -> None:
        """owner: held weakly. wrapper: its class, for errors.

        takes_any_gradient: also what the program sets by hand, of frozen parameters too.
        """
        self.optimizer = optimizer
        self.given_names = dict(names)  # Names from the user, also of parameters that may be added later
        self.slots: list[GradState] = []
        self.planned: Sequence[GradState] = ()  # Those that the newest reducer was made for
        self.tensors: list[Tensor] = []  # The parameters of the slots
        self.hooks = GradientHooks(owner, on_gradient, wrapper)
        self.hooks.take_over(parameter for group in optimizer.param_groups for parameter in group["params"])
        self.one_hook = OneHook(self.hooks)
        self.holds_frozen = False  # Some that are reduced are frozen
        self.left_out: list[Tensor] = []  # Frozen without a gradient, or of a lazy module that is not initialised
        self._takes_any_gradient = takes_any_gradient
        self._step_watch = StepWatch(owner)
        self._watch: ParamGroupDiff | None = None  # None: look thoroughly before the next reduction
        self._refusal: UsageError | None = None  # What steps end with: another rank may take this one for another

    def refuse(self, error: UsageError) -> None:
        """Raise this error in the next pass. Any thread."""
        self._refusal, self._watch = error, None

    def names(self) -> dict[Tensor, str]:
        """Return the parameters whose gradients are reduced, by their names. Local."""
        return {slot.parameter: slot.name for slot in self.slots}

    def all_names(self) -> dict[Tensor, str]:
        """Return the names of all parameters, also of those that are not reduced now."""
        return name_parameters(self.optimizer.param_groups, self.given_names)

    def look_again(self) -> None:
        """Look thoroughly before the next reduction."""
        self._watch = None

    @property
    def looks_again(self) -> bool:
        """Whether the next look is thorough."""
        return self._watch is None

    def may_have_changed(self) -> bool:
        """Return whether `refresh` may find something new: what the program has changed since it was last called."""
        return self._watch is None or self._watch.sees_change(self.optimizer.param_groups)

    def refresh(self, is_reduced: Rule) -> bool:
        """Follow changes of the parameter groups and of requires_grad; return whether there are other slots now."""
        if self._refusal is not None:
            raise self._refusal
        groups = self.optimizer.param_groups
        known = {slot.parameter: slot for slot in self.slots}
        wanted: list[Tensor] = []
        left_out: list[Tensor] = []
        for parameter in (parameter for group in groups for parameter in group["params"]):
            has_shape = not isinstance(parameter, UninitializedParameter)
            (wanted if has_shape and is_reduced(parameter, known.get(parameter)) else left_out).append(parameter)
        self.left_out = left_out if self._takes_any_gradient else []
        held = [parameter for parameter in wanted if not parameter.requires_grad]
        self.holds_frozen = bool(held)
        self._watch = ParamGroupDiff(groups, self.left_out, held)
        same = len(wanted) == len(self.slots) and all(
            slot.still_fits(parameter) for slot, parameter in zip(self.slots, wanted, strict=True)
        )
        if not same:
            self._replace_slots(wanted)
        return not same

    def note_frozen(self) -> None:
        """Note which are frozen now, and watch those that have got hooks of the program's."""
        for slot in self.slots:
            slot.rests = not slot.parameter.requires_grad
            self._step_watch.look_at(slot)

    def _replace_slots(self, parameters: list[Tensor]) -> None:
        names = self.all_names()
        self.hooks.take(parameters)
        known = {slot.parameter: slot for slot in (*self.planned, *self.slots)}
        slots = []
        for index, parameter in enumerate(parameters):
            slot = known.pop(parameter, None)
            if slot is None or not slot.still_fits(parameter):
                slot = GradState(names[parameter], parameter)
            if slot.index < 0:
                self.hooks.attach(parameter, slot)
            slot.index = index
            slots.append(slot)
        for slot in known.values():
            slot.index = -1
            self.hooks.detach(slot.parameter)
        self.slots = slots
        self.tensors = parameters

    def late_gradients(self) -> Sequence[str]:
        """Return the names of gradients that the step would use, and that came too late to be reduced with others."""
        late = [parameter for parameter in self.left_out if parameter.grad is not None]
        names = self.all_names() if late else {}
        return [names[parameter] for parameter in late]

    def take_back(self, *, reduces: bool) -> None:
        """Reduce the parameters again that a wrapper made later has taken over, if it was not used."""
        self.hooks.settle(self.all_names().__getitem__, reduces=reduces)
        self.one_hook.end(self.slots)
        for slot in self.slots:
            if slot.parameter not in self.hooks:
                self.hooks.attach(slot.parameter, slot)
