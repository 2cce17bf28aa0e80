"""Who answers to whom in one backward, and when it is over everywhere. Pure.

    root            whoever is asked first by somebody takes part, and has that worker for a parent;
    |-- a           it says that it is done when its own part is and all whom it has asked have said so.
    |   '-- c       A worker that takes part already and is asked once more says so at once: it is in the tree.
    '-- b

So the root is the last to be done. Whoever has been heard from is in the tree and need not be asked.

Source: E. W. Dijkstra and C. S. Scholten, Termination detection for diffusing computations, 1980.
"""

from __future__ import annotations


class Engagement:
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
