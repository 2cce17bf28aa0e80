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
    """The place of one worker in the tree. Messages between two workers arrive in order."""

    def __init__(self) -> None:
        self.takes_part = False
        self.parent: int | None = None
        """The worker that has asked first; None at the root."""
        self.asked: set[int] = set()
        """The workers that this one has asked and that have not reported."""
        self._known: set[int] = set()

    def join(self, parent: int | None) -> None:
        """Take part from now on. parent: None for the root."""
        self.takes_part = True
        self.parent = parent

    def receive(self, rank: int, *, done: bool) -> None:
        """A message of the run has come from a worker, so that worker is in the tree."""
        self._known.add(rank)
        if done:
            self.asked.discard(rank)

    def send(self, rank: int) -> bool:
        """A message of the run goes to a worker. Returns whether it has to ask that worker to take part."""
        is_new = rank not in self._known
        if is_new:
            self._known.add(rank)
            self.asked.add(rank)
        return is_new

    def knows(self, rank: int) -> bool:
        """Whether a worker takes part or has been asked to."""
        return rank in self._known


class Marking:
    """The place of one worker in the mark phase of SMART: which sends does a backward lead to?

    Marks spread from the root along the messages. Each message with marks is acknowledged once all messages that it has
    caused have been. A worker with unacknowledged messages acknowledges further ones at once, and the first one at the
    end; after that it may be reached again. When the root has all acknowledgements, everything is marked.
    """

    def __init__(self) -> None:
        self.goes_on = False
        self.parent: int | None = None
        """The worker whose message is acknowledged at the end; None at the root."""
        self.unacknowledged: dict[int, int] = {}
        """The number of this worker's own messages by receiver."""

    def begin(self, parent: int | None) -> bool:
        """Marks have come, or the backward begins at the root. False: acknowledge them now."""
        if self.goes_on:
            return False
        self.goes_on = True
        self.parent = parent
        return True

    def send(self, rank: int) -> None:
        """Marks go to a worker."""
        self.unacknowledged[rank] = self.unacknowledged.get(rank, 0) + 1

    def acknowledge(self, rank: int, messages: int) -> None:
        """A worker has acknowledged some messages."""
        if messages:
            left = self.unacknowledged.pop(rank) - messages
            if left:
                self.unacknowledged[rank] = left

    def ends(self) -> bool:
        """Whether marking has just ended on this worker, for now."""
        if not self.goes_on or self.unacknowledged:
            return False
        self.goes_on = False
        return True
