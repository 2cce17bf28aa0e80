"""Which chunks a rank reduces where any rank could: its own from the front, then those of the next rank from the back.

    chunks of rank 1     0 1 2 3 4 5 6 7
    rank 1 itself        0 1 2 3 4             front = 5
    rank 0, which helps            5 6 7       back = 3

Cores are not equally fast from moment to moment, and the slowest would be waited for. Both claim before they begin:
each writes its word, fences, and then reads the other's (Dekker 1965), so that one of them sees a chunk that both have
claimed. A helper that sees one gives its claim back; the owner takes it once the helper has settled. The words carry
the number of the work, so what they hold of an earlier one counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from hvlike.backends.shared_memory.region import BACK, FRONT, SETTLED, Region

Work = TypeVar("Work")

LEAST_SHARED = 8  # Chunks of a rank from which on another one helps; with fewer there is less to gain than it costs
_PART = 4

_SHIFT = 24


class WorkStealing(Generic[Work]):
    """The claims of one rank on one list of chunks, dealt to the ranks in turn."""

    def __init__(self, region: Region, runs: Sequence[Work], first_owner: int) -> None:
        rank, ranks = region.rank, region.ranks
        self._fence = region.fence
        self._mine = runs[(rank - first_owner) % ranks :: ranks]
        self._others = runs[(rank + 1 - first_owner) % ranks :: ranks]
        self._words = region.mine.words
        self._helper = region.counters[(rank - 1) % ranks].words
        self._helped = region.counters[(rank + 1) % ranks].words
        self._tag = 0
        self._front = self._back = self._end = 0
        self._helps = False

    def begin(self, number: int) -> None:
        """Begin the work of this number; the same on all ranks, higher each time."""
        self._tag = number << _SHIFT
        self._front = self._back = 0
        self._end = len(self._mine)
        self._helps = len(self._others) >= LEAST_SHARED

    @property
    def unfinished(self) -> bool:
        """Whether there may be something to take."""
        return self._front < self._end or self._helps

    def take(self, most: int) -> Sequence[Work]:
        """The next runs, at most so many; none where the helper has not settled yet, or nothing is left."""
        if self._front < self._end:
            return self._take_own(most)
        return self._help(most) if self._helps else ()

    def _take_own(self, most: int) -> Sequence[Work]:
        first, mine = self._front, self._mine
        if len(mine) < LEAST_SHARED:
            last = min(first + most, self._end)
        else:
            last = first + min(most, max(1, (self._end - first) // _PART))
            self._words[FRONT] = self._tag + last
            self._fence()
            back = self._helper[BACK]
            left = len(mine) - max(0, back - self._tag)
            if last > left:
                if self._helper[SETTLED] != back:
                    return ()
                last = self._end = left
        self._front = last
        return mine[first:last]

    def _help(self, most: int) -> Sequence[Work]:
        words, others = self._words, self._others
        stop = len(others) - self._back
        while (left := stop - self._owned()) > 0:
            start = stop - min(most, max(1, left // _PART))
            claim = self._tag + len(others) - start
            words[BACK] = claim
            self._fence()
            if start >= self._owned():
                words[SETTLED] = claim
                self._back = len(others) - start
                return others[start:stop]
            words[BACK] = self._tag + self._back
        self._helps = False
        return ()

    def _owned(self) -> int:
        """How many runs the owner that is helped has claimed."""
        return max(0, self._helped[FRONT] - self._tag)
