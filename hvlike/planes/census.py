"""Counting the ranks of a node that say yes, beside other work: a word of shared memory each, no meeting of its own.

    begin    write down the number of the census and yes or no
    ...      other work on the same region
    end      all peers have written theirs by now, or will when they begin: count

Censuses alternate between two words. A rank that has ended number n may begin n + 1 while a peer still looks at n; it
cannot begin n + 2, since n + 1 ends only after that peer has begun it.
"""

from __future__ import annotations

from hvlike.planes.region import Region


class Census:
    """The censuses of one region; every rank of the node takes part in each, in the same order."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._number = 0

    def begin(self, *, yes: bool) -> None:
        """Write down what this rank says in the next census. Does not wait."""
        self._number += 1
        self._region.mine.votes[self._number % 2] = 2 * self._number + yes
        self._region.nudge(self._region.peers)

    def count(self) -> int | None:
        """How many ranks have said yes in the census begun last; None while some have not begun it."""
        votes = [counters.votes[self._number % 2] for counters in self._region.counters]
        if any(vote >> 1 != self._number for vote in votes):
            return None
        return sum(vote & 1 for vote in votes)
