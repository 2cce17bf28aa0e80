"""How the workers of one backward find out that it is over, and that marking is. Pure.

    root            The first worker that asks another one to take part becomes its parent.
    |-- a           A worker reports "done" to its parent when its own part is finished and all workers that it
    |   '-- c       has asked have reported. A worker that takes part already answers "done" at once.
    '-- b

So the root is the last to be done.
Source: E. W. Dijkstra and C. S. Scholten, Termination detection for diffusing computations, 1980.
"""

from __future__ import annotations


class Termination:
    """One worker's place in the tree. Letters of one worker to another arrive in order."""

    def __init__(self) -> None:
        self.takes_part = False
        self.parent: int | None = None
        """Who has asked first; None at the root."""
        self.asked: set[int] = set()
        """Those who were asked by this worker and have not said that they are done."""
        self._known: set[int] = set()

    def join(self, parent: int | None) -> None:
        """Take part from now on. parent: None for the root."""
        self.takes_part = True
        self.parent = parent

    def hear(self, rank: int, *, done: bool) -> None:
        """Something of the run has come from a worker, which so is in the tree."""
        self._known.add(rank)
        if done:
            self.asked.discard(rank)

    def tell(self, rank: int) -> bool:
        """A worker is being told something of the run; return whether it has to be asked with that."""
        new = rank not in self._known
        if new:
            self._known.add(rank)
            self.asked.add(rank)
        return new

    def knows(self, rank: int) -> bool:
        """Whether a worker takes part, or has been asked to."""
        return rank in self._known


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
