"""What a rank contributes for each of its parameters, and what it gets back.

    the gradient that has arrived                  reduced where it is
    local sums that the last pass has not used     the same
    nothing                                        zeros; where no rank has more, the parameter keeps what it has

A gradient that the program has exchanged since it arrived is reduced all the same, as other ranks wait for it. The sum
stays out of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from hvlike.errors import UsageError
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.grad_state import GradState, are_those, gradient_of

_handed_over: Callable[[GradState], Any] = attrgetter("handed_over")


class Arrived(NamedTuple):
    """What backward has left of the gradients of a step."""

    gradients: list[Tensor] | None  # All of them, where each has arrived and is its parameter's; else None
    lost: Sequence[str] = ()  # Whose gradients the program has taken since they arrived
    replaced: Sequence[str] = ()
    changed: Sequence[str] = ()  # In place

    @property
    def were_exchanged(self) -> bool:
        """Whether some parameters have other gradients than those that have arrived."""
        return bool(self.lost or self.replaced)

    @property
    def were_touched(self) -> bool:
        """Whether an error is to be raised when all is reduced."""
        return bool(self.lost or self.replaced or self.changed)

    def error(self) -> UsageError:
        """Return that error. Made where it is raised: a frame that names its own error keeps itself, and the wrapper,
        until the garbage collector runs.
        """
        return usage_errors.gradients_disturbed(self.lost, self.replaced, self.changed)


def look_at(slots: Sequence[GradState], parameters: Sequence[Tensor], changed: Sequence[str]) -> Arrived:
    """Look at the gradients, before they are reduced; `changed`: the names of those that were changed in place."""
    arrived = list(map(_handed_over, slots))
    if are_those(arrived, map(gradient_of, parameters)):
        return Arrived(arrived, changed=changed)
    lost: list[str] = []
    replaced: list[str] = []
    for slot in slots:
        if slot.handed_over is not None and slot.parameter.grad is not slot.handed_over:
            (lost if slot.parameter.grad is None else replaced).append(slot.name)
    return Arrived(None, lost, replaced, changed)


def lacking(slots: Sequence[GradState], unused: Collection[GradState]) -> list[int]:
    """Return the entries for which this rank has nothing: no gradient, or one that counts as `unused`."""
    return [
        slot.index for slot in slots if slot in unused or (slot.handed_over is None and slot.parameter.grad is None)
    ]


def contributions(slots: Sequence[GradState], unused: Collection[GradState], *, densify: bool) -> list[Tensor]:
    """Return what this rank contributes, by entry."""
    return [_unused_contribution(slot) if slot in unused else _contribution(slot, densify=densify) for slot in slots]


def _contribution(slot: GradState, *, densify: bool) -> Tensor:
    gradient = slot.parameter.grad if slot.handed_over is None else slot.handed_over
    if gradient is not None:
        return slot.to_reduce(gradient, densify=densify)
    slot.wire = slot.to_reduce(slot.nothing(), densify=densify)
    return slot.wire


def _unused_contribution(slot: GradState) -> Tensor:
    """Return a copy: the gradient itself stays as it is if no rank has used the parameter."""
    gradient = slot.parameter.grad
    slot.wire = slot.nothing() if gradient is None else gradient.detach().clone()
    return slot.wire


def take_back(slots: Sequence[GradState], replacements: Mapping[int, Tensor], absent: Collection[int]) -> None:
    """Give the parameters what could not be reduced in place, but where their gradients were disturbed."""
    for slot in slots:
        if slot.index in absent or (slot.wire is None and slot.index not in replacements):
            continue
        if slot.handed_over is None or slot.parameter.grad is slot.handed_over:
            slot.take_back(replacements.get(slot.index))
