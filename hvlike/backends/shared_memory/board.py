"""A board in shared memory: the ranks of a node see that they all ask for the same operation now, without a message.

Every rank numbers its operations; the n-th one of a rank meets the n-th ones of the others. A rank that may do its n-th
operation inline writes an entry on the board (`offer`); otherwise it only counts the operation (`passed`). A rank that
sees the same entry of all ranks does the operation. Entries stay, so all ranks see them. A rank that sees a different
entry, or that a peer has passed, gets the answer no; that stays as well. After a no all ranks take the negotiated way.

A rank whose wait times out says so (TIMED_OUT). It withdraws (WITHDRAWN) if the first rank, the head, has not written
its entry yet: nobody does anything before that. Otherwise it waits on (WAITING) until the head has decided. The head
takes its entry back and then looks whether all others are there. If so, somebody may have seen all entries, and the
head puts its entry back; if not, nobody has.

A rank may always pass; whether it offers is its own decision. Names and numbers are compared, never indices alone: a
rank that has counted differently gets a no, never a wrong partner.

Each side writes, fences, and then reads what the other has written (Dekker 1965), so that one of them sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

RING = 2
"""Entries of a rank. The third operation cannot begin before all ranks are through with the first."""

_ENTRY_WORDS = 3
_LINE = 8
# Peers read the first line for every operation and the last seldom. Only its own rank touches the second often.
_STATES = RING * _ENTRY_WORDS
_COUNT, FINISHED = _LINE, _LINE + 1
_ASLEEP, _AWAY, _VERDICTS = 2 * _LINE, 2 * _LINE + 1, 2 * _LINE + 2

WORDS = 3 * _LINE
"""8-byte words of one rank."""

HEAD = 0

_TIMED_OUT, _WAITING, _WITHDRAWN = 1, 2, 3
"""The state of a rank whose wait has timed out: one of these, plus four times the number of the operation."""


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
        self._rank = rank
        self.mine = blocks[rank]
        """The words of this rank; the one at FINISHED is what `finish` writes."""
        self.count = self.mine[_COUNT : _COUNT + 1]
        """The word of the operations that this rank has asked for."""
        self._head = blocks[HEAD]
        self._peers = [block for peer, block in enumerate(blocks) if peer != rank]
        self._barrier = barrier
        self._order = order
        self._wake = wake
        self._looks = looks
        self._agreed = [0] * RING
        self.following = -1
        """The place of operation number `following` is free for certain: all have begun the one before."""

    def passed(self, count: int) -> None:
        """This rank has asked for `count` operations, the last of them by negotiation."""
        self.mine[_COUNT] = count

    def set_away(self, away: bool) -> None:
        """Whether this rank asks for nothing while the others go on (it has joined)."""
        self.mine[_AWAY] = away

    def set_asleep(self, asleep: bool) -> None:
        """Whether this rank must be woken when an entry is written. A barrier must follow, then another look."""
        self.mine[_ASLEEP] = asleep

    # All in one frame: a caller whose caches are cold pays more for a call than for the work.
    def offer(self, index: int, kind: int, name: int) -> bool | None:
        """Offer to do operation number `index` inline; what it needs of this rank's memory is written already.

        kind, name: 64-bit numbers that are equal on all ranks for the same operation.
        Returns True when all ranks do it, None when that is not known at first sight: then wake the others, and `look`.
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
            state, sleeps = _STATES + place, 0
            for peer in self._peers:
                if peer[entry + 1] != kind or peer[entry + 2] != name or peer[state] >> 2 == number:
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
            self.give_up(index)
            raise
        return True

    def give_up(self, index: int) -> None:
        """This rank leaves in the middle of operation number `index`, which it has offered."""
        self.withdraw(index)
        self.finish(index)
        self._wake()

    def is_free(self, index: int) -> bool:
        """True when all are through with what was in the place of operation number `index`."""
        needed = self._agreed[index % RING]
        return all(peer[FINISHED] >= needed for peer in self._peers)

    def look(self, index: int) -> bool | None:
        """The answer about operation number `index`, which this rank has offered; None: not yet."""
        number = index + 1
        refused, complete, timed_out = False, True, False
        for peer in self._peers:
            there = self._is_there(peer, index)
            state = peer[_STATES + index % RING]
            if state >> 2 == number and state & 3 != _WAITING:
                # It is between two statements, or has withdrawn.
                refused = refused or state & 3 == _WITHDRAWN
                complete = False
            if there is None:
                complete = False
                timed_out = timed_out or bool(peer[_AWAY])
            elif not there:
                refused = True
            timed_out = timed_out or state >> 2 == number
        self._keep_order()
        if not refused and complete and self._head[index % RING * _ENTRY_WORDS] == number:
            return self._yes(index)
        if self._rank == HEAD:
            return self._decide(index) if refused or timed_out else None
        if refused:
            return False
        # A head that is away may come back and find this entry.
        return self.withdraw(index) if self._head[_AWAY] and not self._has_entered(index) else None

    def withdraw(self, index: int) -> bool | None:
        """Wait no longer; returns the answer, None if the head has to decide: look again."""
        if self._rank == HEAD:
            return self._decide(index)
        state, number = _STATES + index % RING, index + 1
        self.mine[state] = 4 * number + _TIMED_OUT
        with self._barrier:
            pass
        stays = self._has_entered(index)
        self.mine[state] = 4 * number + (_WAITING if stays else _WITHDRAWN)
        return self.look(index) if stays else False

    def finish(self, index: int) -> None:
        """This rank is through with the memory of all ranks for operation number `index`."""
        self.mine[FINISHED] = index + 1

    def _yes(self, index: int) -> bool:
        self._agreed[index % RING] = index + 1
        self.following = index + 1
        return True

    def _has_entered(self, index: int) -> bool:
        """Whether the head has come to operation number `index`."""
        head = self._head
        return head[_COUNT] > index or head[index % RING * _ENTRY_WORDS] == index + 1

    def _is_there(self, peer: memoryview, index: int) -> bool | None:
        """Whether a rank has offered the same operation as this one; None: it still may, or the head is deciding."""
        entry, mine = index % RING * _ENTRY_WORDS, self.mine
        # First the count, then the entry: a rank writes them the other way round.
        counted = peer[_COUNT] > index
        self._keep_order()
        if peer[entry] == index + 1:
            self._keep_order()
            same = peer[entry + 1] == mine[entry + 1] and peer[entry + 2] == mine[entry + 2]
            self._keep_order()
            return same if peer[entry] == index + 1 else None
        self._keep_order()
        deciding = peer is self._head and peer[_VERDICTS + index % RING] == 2 * (index + 1)
        return False if counted and not deciding else None

    def _decide(self, index: int) -> bool | None:
        """The head takes its entry back unless all are there; None: a rank is between two statements, look again."""
        place, number, mine = index % RING, index + 1, self.mine
        states = [peer[_STATES + place] - 4 * number for peer in self._peers]
        if _TIMED_OUT in states:
            return None
        mine[_VERDICTS + place] = 2 * number
        self._keep_order()
        mine[place * _ENTRY_WORDS] = 0
        with self._barrier:
            pass
        if _WITHDRAWN not in states and all(self._is_there(peer, index) for peer in self._peers):
            mine[place * _ENTRY_WORDS] = number
            return self._yes(index)
        mine[_VERDICTS + place] = 2 * number + 1
        return False

    def _keep_order(self) -> None:
        if self._order is not None:
            self._order()
