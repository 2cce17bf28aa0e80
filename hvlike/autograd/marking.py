"""The mark phase of SMART: which sends does a backward lead to? Pure.

Marks spread from the root along the messages; each letter with marks is acknowledged once all letters that it has
caused have been. A worker in the middle of that acknowledges further ones at once, the first one at the end; after its
end it may be reached anew. When the root's own letters are acknowledged, everything is marked.

Source: E. W. Dijkstra and C. S. Scholten, Termination detection for diffusing computations, 1980.
"""

from __future__ import annotations


class Marking:
    """One worker's place in it."""

    def __init__(self) -> None:
        self.goes_on = False
        self.parent: int | None = None
        """Whose letter is acknowledged at the end; None at the root."""
        self.unacknowledged: dict[int, int] = {}
        """How many letters of this worker's own, by receiver."""

    def begin(self, parent: int | None) -> bool:
        """A letter with marks has come, or at the root the backward begins; False: acknowledge it now."""
        if self.goes_on:
            return False
        self.goes_on = True
        self.parent = parent
        return True

    def sent(self, rank: int) -> None:
        """A letter with marks leaves for a worker."""
        self.unacknowledged[rank] = self.unacknowledged.get(rank, 0) + 1

    def acknowledged(self, rank: int, letters: int) -> None:
        """A worker has followed some of them to their ends."""
        if letters:
            left = self.unacknowledged.pop(rank) - letters
            if left:
                self.unacknowledged[rank] = left

    def ends(self) -> bool:
        """Whether it has just ended here, for now."""
        if not self.goes_on or self.unacknowledged:
            return False
        self.goes_on = False
        return True
