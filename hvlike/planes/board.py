"""A board in shared memory: the ranks of a node see that they all ask for the same now, without a message.

Every rank numbers what it asks for; the n-th thing on one rank meets the n-th thing on the others. A rank that may do
its n-th thing at once writes it on the board (`begin`), the others count theirs past it (`passed`). The first rank,
the head, looks at all entries. If all are the same it says yes; if one differs, or its rank has passed, no. So every
rank hears the same answer, and after a no all ask in the ordinary way. A rank that is tired of waiting withdraws.

A rank may always pass; whether it begins is its own affair. Names and numbers are compared, never indices alone: a
rank that has counted otherwise than the others gets a no, never a wrong partner.

Head and withdrawing rank each write, fence, and then read what the other has written (Dekker 1965), so one of them
sees the other: nobody can withdraw from what the head says yes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

RING = 2
"""Entries of a rank. The third thing cannot begin before all are through with the first."""

_COUNT, _WITHDRAWN, _AWAY, _FINISHED, _DECIDING, _VERDICTS = range(6)
_ENTRIES = _VERDICTS + RING
_ENTRY_WORDS = 3

WORDS = _ENTRIES + RING * _ENTRY_WORDS
"""8-byte words of one rank."""

HEAD = 0


class Board:
    """One rank's view; ranks count within the group. Nothing here blocks."""

    def __init__(
        self, blocks: Sequence[memoryview], rank: int, fence: Callable[[], None], order: Callable[[], None]
    ) -> None:
        """blocks: WORDS words of every rank, zero at first.

        fence: a full memory barrier; order: a barrier between stores, and between loads.
        """
        self._blocks = blocks
        self._rank = rank
        self._mine = blocks[rank]
        self._head = blocks[HEAD]
        self._peers = [block for peer, block in enumerate(blocks) if peer != rank]
        self._fence = fence
        self._order = order
        self._agreed = [0] * RING

    def passed(self, count: int) -> None:
        """This rank has asked for `count` things, the last of them in the ordinary way."""
        self._mine[_COUNT] = count

    def set_away(self, away: bool) -> None:
        """Whether this rank asks for nothing while the others go on (it has joined)."""
        self._mine[_AWAY] = away

    def begin(self, index: int, kind: int, name: int) -> None:
        """Offer to do thing number `index` at once; what it needs of this rank's memory is written already.

        kind, name: 64-bit numbers that are equal on all ranks for the same thing.
        """
        mine = self._mine
        entry = _ENTRIES + index % RING * _ENTRY_WORDS
        mine[entry + 1] = kind
        mine[entry + 2] = name
        mine[entry] = index + 1
        self._order()
        mine[_COUNT] = index + 1

    def is_free(self, index: int) -> bool:
        """True when all are through with what was in the place of thing number `index`."""
        needed = self._agreed[index % RING]
        for block in self._peers:
            if block[_FINISHED] < needed:
                break
        else:
            return True
        return False

    def look(self, index: int) -> bool | None:
        """The answer about thing number `index`, which this rank has begun; None: not yet. The head makes it."""
        if self._rank == HEAD:
            answer = self._decide(index)
        else:
            answer = self._hear(index)
            if answer is None and self._head[_AWAY]:
                # It may come back and find this entry: what is given up must be withdrawn.
                return self.withdraw(index)
        return self._noted(index, answer)

    def withdraw(self, index: int) -> bool | None:
        """Wait no longer; the answer, False if it was in time, None if the head is just deciding: look again."""
        if self._rank == HEAD:
            return self._answer(index, False)
        self._mine[_WITHDRAWN] = index + 1
        self._fence()
        deciding = self._head[_DECIDING] == index + 1
        answer = self._noted(index, self._hear(index))
        return answer if answer is not None or deciding else False

    def finish(self, index: int) -> None:
        """This rank is through with the memory of all ranks for thing number `index`."""
        self._mine[_FINISHED] = index + 1

    def _noted(self, index: int, answer: bool | None) -> bool | None:
        if answer:
            self._agreed[index % RING] = index + 1
        return answer

    def _decide(self, index: int) -> bool | None:
        entry = _ENTRIES + index % RING * _ENTRY_WORDS
        mine = self._mine
        kind, name = mine[entry + 1], mine[entry + 2]
        complete = True
        for block in self._peers:
            if block[_COUNT] > index:
                self._order()
                if block[entry] != index + 1 or block[entry + 1] != kind or block[entry + 2] != name:
                    return self._answer(index, False)
                if block[_WITHDRAWN] > index:
                    return self._answer(index, False)
            elif block[_AWAY]:
                return self._answer(index, False)
            else:
                complete = False
        if not complete:
            return None
        mine[_DECIDING] = index + 1
        self._fence()
        return self._answer(index, all(block[_WITHDRAWN] <= index for block in self._peers))

    def _answer(self, index: int, answer: bool) -> bool:
        self._order()
        self._mine[_VERDICTS + index % RING] = 2 * (index + 1) + answer
        return answer

    def _hear(self, index: int) -> bool | None:
        """What the head has said, or no when it can say nothing any more."""
        head = self._head
        said = head[_VERDICTS + index % RING]
        if said >> 1 == index + 1:
            return bool(said & 1)
        # First the count, then the entry: a rank writes them the other way round.
        counted = head[_COUNT] > index
        self._order()
        passed = counted and head[_ENTRIES + index % RING * _ENTRY_WORDS] != index + 1
        if said >> 1 > index + 1 or passed:
            # It may have spoken since it was looked at, and then gone on.
            self._order()
            said = head[_VERDICTS + index % RING]
            return said >> 1 == index + 1 and bool(said & 1)
        return None
