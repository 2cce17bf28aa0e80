"""What a compressor with rounds of its own may ask of the ranks it reduces over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hvlike.transport.routine import Routine


class Exchange(Protocol):
    """The ranks of one reduction, seen by one of them. Every rank asks for the same, in the same order."""

    @property
    def rank(self) -> int:
        """The place of this rank among those of the reduction."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def factor(self) -> float:
        """What a plain sum over the ranks is to be multiplied by: the factors, and 1 / size for Average."""

    def allreduce(self, tensors: Sequence[Tensor]) -> Routine[None]:
        """Reduce in place with the op and the factors of the reduction; bitwise the same result on every rank."""

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> Routine[None]:
        """Write each contiguous tensor from the rank `owners[i]` to all others, bit by bit."""

    def are_finite(self, groups: Sequence[Sequence[Tensor]]) -> Routine[list[bool]]:
        """For each group whether all elements of its tensors are finite; no thread waits for a GPU meanwhile."""
