"""A board in shared memory: the ranks of a node see that they all ask for the same operation now, without a message.

Every rank numbers its operations; the n-th one of a rank meets the n-th ones of the others. A rank either offers its
n-th operation, by an entry on the board, or passes it: its count says so. It does so once and for all. So all decide
alike: where all entries are equal, all do the operation inline; else all negotiate it. Names and numbers are compared,
never indices alone: a rank that has counted differently gets a no, never a wrong partner.

    offer        this rank asks for operation n, and has written what the others need of its memory
    count > n    without an entry: this rank has passed n, or is through with it
    finish       this rank does not read the memory of the others for operation n any more

An entry is replaced only once all ranks are through with it, if it was agreed; else who looks for it late sees the
count, and hears the same no. A rank that is told to hurry raises its count (controller/inline_agreement.py).

Each side writes, fences, and then reads what the other has written (Dekker 1965), so that one of them sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

RING = 2
"""Entries of a rank. The third operation cannot begin before all ranks are through with the first."""

_ENTRY_WORDS = 3
_LINE = 8
# Peers read the first line for every operation. Only its own rank touches the second often.
_COUNT, FINISHED = RING * _ENTRY_WORDS, _LINE
_ASLEEP = RING * _ENTRY_WORDS + 1

WORDS = 2 * _LINE
"""8-byte words of one rank."""


class Board:
    """One rank's view; ranks count within the group. Nothing here blocks."""

    def __init__(
        self,
        blocks: Sequence[memoryview],
        rank: int,
        barrier: AbstractContextManager[object],
        order: Callable[[], None] | None,
        wake: Callable[[], None],
        looks: int,
    ) -> None:
        """Look at the blocks of all ranks.

        Args:
            blocks: WORDS words of every rank, zero at first, each block at the start of a cache line.
            rank: of this process.
            barrier: To enter and leave it is a full memory barrier.
            order: A barrier between stores, and between loads; None where the machine keeps their order.
            wake: Wakes the peers that sleep.
            looks: How often `offer` checks for a peer that has not come.
        """
        self.mine = blocks[rank]
        """The words of this rank; the one at FINISHED is what `finish` writes."""
        self.count = self.mine[_COUNT : _COUNT + 1]
        """The word of the operations that this rank has offered or passed. It only grows."""
        self._peers = [block for peer, block in enumerate(blocks) if peer != rank]
        self._barrier = barrier
        self._order = order
        self._wake = wake
        self._looks = looks
        self._agreed = [0] * RING
        self.following = -1
        """The place of operation number `following` is free for certain: all have begun the one before."""

    def passed(self, count: int) -> None:
        """This rank offers no operation below number `count` any more. Not while it offers one."""
        if self.mine[_COUNT] < count:
            self.mine[_COUNT] = count
            self.following = -1

    def set_asleep(self, asleep: bool) -> None:
        """Whether this rank must be woken when an entry is written. A barrier must follow, then another look."""
        self.mine[_ASLEEP] = asleep

    # All in one frame: a caller whose caches are cold pays more for a call than for the work.
    def offer(self, index: int, kind: int, name: int) -> bool | None:
        """Offer to do operation number `index` inline; what it needs of this rank's memory is written already.

        kind, name: 64-bit numbers that are equal on all ranks for the same operation.
        Returns True when all ranks do it, None when that is not known at first sight: then wake the others, and `look`.
        No thread may raise the count meanwhile.
        """
        mine, order, looks = self.mine, self._order, self._looks
        place, number = index % RING, index + 1
        entry = place * _ENTRY_WORDS
        try:
            # A peer that compares the old entry must see that it goes.
            mine[entry] = 0
            if order is not None:
                order()
            mine[entry + 1] = kind
            mine[entry + 2] = name
            if order is not None:
                order()
            mine[entry] = number
            if order is not None:
                # Who sees the count, and not the entry, takes the operation for passed.
                order()
            mine[_COUNT] = number
            with self._barrier:
                pass
            for peer in self._peers:
                while peer[entry] != number:
                    looks -= 1
                    if looks < 0:
                        return None
            if order is not None:
                order()
            sleeps = 0
            for peer in self._peers:
                if peer[entry + 1] != kind or peer[entry + 2] != name:
                    return None
                sleeps = sleeps or peer[_ASLEEP]
            if order is not None:
                order()
            for peer in self._peers:
                if peer[entry] != number:
                    return None
            self._agreed[place] = number
            self.following = number
            if sleeps:
                self._wake()
        except BaseException:
            # Without an entry this is a pass. `look` tells which it is.
            mine[_COUNT] = number
            raise
        return True

    def is_free(self, index: int) -> bool:
        """Whether operation number `index` may be offered: it was not passed, and all are through with its place."""
        needed = self._agreed[index % RING]
        return self.mine[_COUNT] <= index and all(peer[FINISHED] >= needed for peer in self._peers)

    def look(self, index: int) -> bool | None:
        """The answer about operation number `index`, which this rank has offered; None: not yet."""
        mine, number = self.mine, index + 1
        entry, complete = index % RING * _ENTRY_WORDS, mine[index % RING * _ENTRY_WORDS] == number
        if not complete:
            # It was interrupted before.
            return False
        for peer in self._peers:
            # First the count, then the entry: a rank writes them the other way round.
            counted = peer[_COUNT] > index
            self._keep_order()
            if peer[entry] == number:
                self._keep_order()
                same = peer[entry + 1] == mine[entry + 1] and peer[entry + 2] == mine[entry + 2]
                self._keep_order()
                if not same or peer[entry] != number:
                    return False
            elif counted:
                return False
            else:
                complete = False
        if not complete:
            return None
        self._agreed[index % RING] = number
        return True

    def finish(self, index: int) -> None:
        """This rank is through with the memory of all ranks for operation number `index`."""
        self.mine[FINISHED] = index + 1

    def _keep_order(self) -> None:
        if self._order is not None:
            self._order()
