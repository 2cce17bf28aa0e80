"""What gradients are handed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """What reduces a list of tensors, the same one over and over: a PlannedReducer."""

    @property
    def wants_marks(self) -> bool:
        """True while every tensor is to be marked ready; else the first one of a step is enough."""

    @property
    def active(self) -> int:
        """How many ranks took part in the last step with tensors of their own; 0 where that is not known."""

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Tensor `index` is final for this step."""

    def finish(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Wait until all are reduced, in place; those that take the place of others, by index."""

    def close(self) -> None:
        """Forget what was agreed."""
