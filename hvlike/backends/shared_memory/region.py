"""The part of a segment in which the ranks of one node reduce together: counters and staging slots.

    counters of rank 0 | counters of rank 1 | ... | slots of rank 0 | slots of rank 1 | ...

Every counter has one writer and only grows:

    staged[o]     chunks this rank has copied into its slots for owner o
    taken[o]      results of owner o this rank has copied out
    reduced       chunks this rank has reduced as their owner
    published     chunks this rank has written into its own slots for everybody (gather)
    fetched[o]    chunks published by o this rank has copied out
    passed[o]     chunks this rank has put into its slots for o alone (alltoall)
    received[o]   chunks put there by o for this rank that it has copied out
    stamps[2]     hash of the work this rank is at, by parity of the work's number
    votes[2]      what this rank says in a count, by parity of its number (ActiveRankCount)
    failed        why this rank has given the region up: APART or LEFT; 0: it has not
    arrived       number of the newest work this rank has entered
    departed      number of the newest work that is not staged of which this rank has done its part
    places[2]     which tensors of the work lie where in shared allocations, by parity of the work's number
    abandoned     number of the newest work in this rank's own memory that it has given up
    front         chunks of its own this rank claims, from the front (work_stealing.py)
    back          chunks of the next rank this rank claims, from the back
    settled       chunks of the next rank this rank has claimed for certain
    spent         nanoseconds of the newest work that was timed (algorithm_choice.py)
    addresses     where the tensors of the newest work lie in this rank's own memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.scratch import SilentErrstate
from hvlike.backends.shared_memory.schedule import SLOTS
from hvlike.transport.memory.doorbell import X86, Doorbell, Fence
from hvlike.transport.memory.segment import Segment, words

REDUCED, DEPARTED, PLACES, FRONT, BACK, SETTLED, SPENT = 0, 6, 7, 10, 11, 12, 13
"""Which of a rank's words hold these, for those who look often: see Counters."""

APART, LEFT = 1, 2
"""The ranks are at different work; a rank has left one in the middle."""

ADDRESSES = 2048
"""How many tensors of one piece of work can be reached in a rank's own memory."""

_WORDS = 14
_LINE = 128


def region_bytes(ranks: int, chunk: int) -> int:
    """Bytes of a region for `ranks` ranks and chunks of `chunk` bytes."""
    return ranks * _counter_bytes(ranks) + ranks * ranks * SLOTS * chunk


def _counter_bytes(ranks: int) -> int:
    return -(-8 * (5 * ranks + 2 + _WORDS + ADDRESSES) // _LINE) * _LINE


class RankCounters:
    """The counters of one rank; see the head of this file."""

    __slots__ = ("addresses", "fetched", "passed", "received", "staged", "taken", "votes", "words")

    def __init__(self, segment: Segment, rank: int, ranks: int) -> None:
        first = rank * _counter_bytes(ranks)
        self.staged = words(segment, first, ranks)
        self.taken = words(segment, first + 8 * ranks, ranks)
        self.fetched = words(segment, first + 16 * ranks, ranks)
        self.passed = words(segment, first + 24 * ranks, ranks)
        self.received = words(segment, first + 32 * ranks, ranks)
        self.votes = words(segment, first + 40 * ranks, 2)
        self.words = words(segment, first + 40 * ranks + 16, _WORDS)
        self.addresses = words(segment, first + 40 * ranks + 16 + 8 * _WORDS, ADDRESSES)

    @property
    def reduced(self) -> int:
        """Chunks reduced by this rank."""
        return self.words[REDUCED]

    @reduced.setter
    def reduced(self, value: int) -> None:
        self.words[REDUCED] = value

    @property
    def published(self) -> int:
        """Chunks published by this rank."""
        return self.words[1]

    @published.setter
    def published(self, value: int) -> None:
        self.words[1] = value

    @property
    def failed(self) -> int:
        """Why this rank has given the region up; 0: it has not."""
        return self.words[2]

    @failed.setter
    def failed(self, value: int) -> None:
        self.words[2] = value

    def stamp(self, number: int) -> int:
        """The hash of the piece of work `number` as this rank sees it."""
        return self.words[3 + number % 2]

    @property
    def arrived(self) -> int:
        """The number of the newest piece of work that this rank has entered."""
        return self.words[5]

    @property
    def abandoned(self) -> int:
        """The number of the newest piece of work in its own memory that this rank has given up."""
        return self.words[9]

    @abandoned.setter
    def abandoned(self, value: int) -> None:
        self.words[9] = value

    def arrive(self, number: int, stamp: int, place: int) -> None:
        """Say what the piece of work `number` is on this rank; whoever sees that it has arrived sees the rest."""
        self.words[3 + number % 2] = stamp
        self.words[PLACES + number % 2] = place
        self.words[5] = number


class Slots(NamedTuple):
    """The slots of one rank for one dtype, by turn modulo SLOTS."""

    staged: list[list[Piece]]
    """For each owner: where this rank stages."""
    copies: list[list[Piece]]
    """For each turn: what the peers have staged for this rank, in the order of the ranks."""
    results: list[list[Piece]]
    """For each owner: where its results are taken from."""


class Region:
    """One rank's view of the region; `rank` and `ranks` count within the node."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: int,
        chunk: int,
        bells: list[Doorbell],
        fence: Fence,
        *,
        crowded: bool = False,
    ) -> None:
        """crowded: there are fewer cores than ranks, so that a waiting one should not look too often."""
        self.crowded = crowded
        self.quiet = SilentErrstate()
        self.rank = rank
        self.ranks = ranks
        self.chunk = chunk
        self.peers = [peer for peer in range(ranks) if peer != rank]
        self.counters = [RankCounters(segment, each, ranks) for each in range(ranks)]
        self.mine = self.counters[rank]
        self.others = [self.counters[peer] for peer in self.peers]
        """The counters of the peers."""
        self._segment = segment
        self._slots_start = ranks * _counter_bytes(ranks)
        self._bells = bells
        self.fence = fence
        self._typed: dict[tuple[torch.dtype, int, int, int], Piece] = {}
        self._tables: dict[torch.dtype, Slots] = {}
        self.sleepers = [bells[peer] for peer in self.peers]
        """The bells of the peers."""
        self.order = order_by(fence)

    def slot(self, arithmetic: Arithmetic, stager: int, owner: int, turn: int) -> Piece:
        """The slot in which `stager` stages the `turn`-th chunk of `owner`; stager == owner: where owner publishes."""
        key = (arithmetic.dtype, stager, owner, turn % SLOTS)
        piece = self._typed.get(key)
        if piece is None:
            number = (stager * self.ranks + owner) * SLOTS + turn % SLOTS
            start = self._slots_start + number * self.chunk
            piece = self._typed[key] = arithmetic.over(self._segment.array[start : start + self.chunk])
        return piece

    def slots(self, arithmetic: Arithmetic) -> Slots:
        """The slots of reductions of this dtype."""
        table = self._tables.get(arithmetic.dtype)
        if table is None:
            rank, everybody = self.rank, range(self.ranks)

            def both(stager: int, owner: int) -> list[Piece]:
                return [self.slot(arithmetic, stager, owner, turn) for turn in range(SLOTS)]

            copies = [[self.slot(arithmetic, peer, rank, turn) for peer in self.peers] for turn in range(SLOTS)]
            table = Slots(
                [both(rank, owner) for owner in everybody],
                copies,
                [both(first_peer(owner), owner) for owner in everybody],
            )
            self._tables[arithmetic.dtype] = table
        return table

    def is_same_place(self, number: int) -> bool:
        """Whether all ranks, which have met, have said the same place for the piece of work `number`."""
        word = PLACES + number % 2
        place = self.mine.words[word]
        return all(counters.words[word] == place for counters in self.others)

    def notify_if_sleeping(self, ranks: Iterable[int]) -> None:
        """Wake those of `ranks` that sleep, after counters they may wait for were advanced."""
        self.fence()
        bells = self._bells
        for rank in ranks:
            bells[rank].notify_if_sleeping()


def first_peer(owner: int) -> int:
    """The rank over whose staged copy `owner` writes the result of a reduction."""
    return 0 if owner else 1


def order_by(fence: Fence) -> Callable[[], None]:
    """What keeps stores, and loads, in their order on this machine."""
    return _nothing if X86 else fence


def _nothing() -> None:
    pass


class ActiveRankCount:
    """The censuses of one region; every rank of the node takes part in each, in the same order."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._number = 0

    def begin(self, *, yes: bool) -> None:
        """Write down what this rank says in the next census. Does not wait."""
        self._number += 1
        self._region.mine.votes[self._number % 2] = 2 * self._number + yes
        self._region.notify_if_sleeping(self._region.peers)

    def count(self) -> int | None:
        """How many ranks have said yes in the census begun last; None while some have not begun it."""
        votes = [counters.votes[self._number % 2] for counters in self._region.counters]
        if any(vote >> 1 != self._number for vote in votes):
            return None
        return sum(vote & 1 for vote in votes)
