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
    lengths[2]    bytes this rank sends to each in an alltoall and expects from each, by parity of the work's number
    stamps[2]     hash of the work this rank is at, by parity of the work's number
    failed        why this rank has given the region up: APART, LEFT or LOST; 0: it has not
    arrived       number of the newest work this rank has entered
    departed      number of the newest work that is not staged of which this rank has done its part
    places[2]     which tensors of the work lie where in shared allocations, by parity of the work's number
    abandoned     number of the newest work in this rank's own memory that it has given up
    front         chunks of its own this rank claims, from the front (WorkStealing)
    back          chunks of the next rank this rank claims, from the back
    settled       chunks of the next rank this rank has claimed for certain
    active[2]     whether this rank is active in the work, by parity of the work's number
    total         how many ranks of all nodes are active, as the first rank of the node has heard
    addresses     where the tensors of the newest work lie in this rank's own memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import SilentErrstate
from hvlike.backends.shared_memory.schedule import SLOTS
from hvlike.errors import PeerLeftError
from hvlike.system.mapped_memory import Segment
from hvlike.system.system import system
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import Doorbell, Fence
from hvlike.transport.memory.dtypes import EVERYTHING, FIRST_ADDRESS, Array, bytes_at

REDUCED, PUBLISHED, FAILED, STAMPS, ARRIVED, DEPARTED, PLACES, ABANDONED = 0, 1, 2, 3, 5, 6, 7, 9
# Which of a rank's words hold these. Of those with a parity, the first.
FRONT, BACK, SETTLED, ACTIVE, TOTAL = 10, 11, 12, 13, 15
APART, LEFT, LOST = 1, 2, 3
"""The ranks are at different work; a rank has left one in the middle; it has because the process of another is lost."""
ADDRESSES = 2048  # How many tensors of one piece of work can be reached in a rank's own memory
_WORDS = 16
_LINE = 128


def region_bytes(ranks: int, chunk: int) -> int:
    return ranks * _counter_bytes(ranks) + ranks * ranks * SLOTS * chunk


def _counter_bytes(ranks: int) -> int:
    return -(-8 * (9 * ranks + _WORDS + ADDRESSES) // _LINE) * _LINE


class RankCounters:
    __slots__ = ("addresses", "fetched", "lengths", "passed", "received", "staged", "taken", "words")

    def __init__(self, segment: Segment, rank: int, ranks: int) -> None:
        first = rank * _counter_bytes(ranks)
        self.staged = system.words(segment, first, ranks)
        self.taken = system.words(segment, first + 8 * ranks, ranks)
        self.fetched = system.words(segment, first + 16 * ranks, ranks)
        self.passed = system.words(segment, first + 24 * ranks, ranks)
        self.received = system.words(segment, first + 32 * ranks, ranks)
        self.words = system.words(segment, first + 40 * ranks, _WORDS)
        self.addresses = system.words(segment, first + 40 * ranks + 8 * _WORDS, ADDRESSES)
        first += 40 * ranks + 8 * (_WORDS + ADDRESSES)
        self.lengths = [system.words(segment, first + 16 * ranks * parity, 2 * ranks) for parity in range(2)]


class Slots(NamedTuple):
    """The slots of one rank for one dtype, by turn modulo SLOTS."""

    staged: list[list[Piece]]  # For each owner: where this rank stages
    copies: list[list[Piece]]  # For each turn: what the peers have staged for this rank, in the order of the ranks
    results: list[list[Piece]]  # For each owner: where its results are taken from


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
        spin: SpinPolicy,
    ) -> None:
        self.spin = spin
        self.quiet = SilentErrstate()
        self.rank = rank
        self.ranks = ranks
        self.chunk = chunk
        self.peers = [peer for peer in range(ranks) if peer != rank]
        self.counters = [RankCounters(segment, each, ranks) for each in range(ranks)]
        self.mine = self.counters[rank]
        self.others = [self.counters[peer] for peer in self.peers]
        self._segment = segment
        self._slots_start = ranks * _counter_bytes(ranks)
        self.fence = fence
        self._tables: dict[torch.dtype, Slots] = {}
        self._byte_slots: dict[tuple[int, int], list[Array]] = {}
        self._scratch = np.empty(chunk, np.uint8)
        self._typed_scratch: dict[torch.dtype, Piece] = {}
        self.sleepers = [bells[peer] for peer in self.peers]
        # Keeps stores, and loads, in their order on this machine: nothing has to on x86.
        self.order: Callable[[], object] = ().__len__ if system.orders_stores else fence
        self.turns = [0] * ranks
        """Chunks that each rank has owned so far, the same on every rank; modulo SLOTS the number of a slot."""

    def byte_slots(self, stager: int, owner: int) -> list[Array]:
        """The slots in which `stager` stages for `owner`, by turn modulo SLOTS; owner == stager: for everybody."""
        known = self._byte_slots.get((stager, owner))
        if known is None:
            first, chunk = self._slots_start + (stager * self.ranks + owner) * SLOTS * self.chunk, self.chunk
            known = [self._segment.array[each : each + chunk] for each in range(first, first + SLOTS * chunk, chunk)]
            self._byte_slots[stager, owner] = known
        return known

    def slots(self, arithmetic: Arithmetic) -> Slots:
        table = self._tables.get(arithmetic.dtype)
        if table is None:
            rank, everybody = self.rank, range(self.ranks)

            def both(stager: int, owner: int) -> list[Piece]:
                return [arithmetic.over(slot) for slot in self.byte_slots(stager, owner)]

            table = Slots(
                [both(rank, owner) for owner in everybody],
                [list(copies) for copies in zip(*(both(peer, rank) for peer in self.peers), strict=True)],
                [both(first_peer(owner), owner) for owner in everybody],
            )
            self._tables[arithmetic.dtype] = table
        return table

    def scratch(self, arithmetic: Arithmetic) -> Piece:
        piece = self._typed_scratch.get(arithmetic.dtype)
        if piece is None:
            piece = self._typed_scratch[arithmetic.dtype] = arithmetic.over(self._scratch)
        return piece

    def is_same_place(self, number: int) -> bool:
        """Whether all ranks, which have arrived, have posted the same place for the work `number`."""
        word = PLACES + number % 2
        place = self.mine.words[word]
        return all(counters.words[word] == place for counters in self.others)

    def give_up(self, error: BaseException) -> None:
        """This rank leaves a work in the middle; the peers see why."""
        words = self.mine.words
        words[FAILED] = words[FAILED] or (LOST if isinstance(error, PeerLeftError) else LEFT)

    def notify_if_sleeping(self) -> None:
        """Wake the peers that sleep, after counters they may wait for were advanced."""
        with self.fence.barrier:
            pass
        for bell in self.sleepers:
            if bell.asleep[0]:
                bell.notify_if_sleeping()


def first_peer(owner: int) -> int:
    """The rank over whose staged copy `owner` writes the result of a reduction."""
    return 0 if owner else 1


class AddressView:
    """Slices keep none of the memory: the caller holds the tensors that lie there."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._itemsize = arithmetic.itemsize
        self._everything = arithmetic.over(EVERYTHING)

    def elements(self, address: int, count: int) -> Piece:
        """So many elements from an address on."""
        first, odd = divmod(address - FIRST_ADDRESS, self._itemsize)
        if odd or first < 0:
            return self._arithmetic.over(bytes_at(address, count * self._itemsize))
        return self._everything[first : first + count]

    def chunks(self, addresses: Sequence[int], *tables: Sequence[Sequence[tuple[int, int, int]]]) -> list[list[Any]]:
        """The elements of tables of runs of tensors at these addresses; a list where a chunk has several runs."""
        itemsize, everything = self._itemsize, self._everything
        firsts, found = [], []
        for address in addresses:
            first, odd = divmod(address - FIRST_ADDRESS, itemsize)
            if odd or first < 0:
                return [self._odd_chunks(addresses, table) for table in tables]
            firsts.append(first)
        for table in tables:
            chunks: list[Any] = []
            for runs in table:
                if len(runs) == 1:
                    ((tensor, start, stop),) = runs
                    chunks.append(everything[firsts[tensor] + start : firsts[tensor] + stop])
                else:
                    chunks.append([everything[firsts[tensor] + a : firsts[tensor] + b] for tensor, a, b in runs])
            found.append(chunks)
        return found

    def _odd_chunks(self, addresses: Sequence[int], table: Sequence[Sequence[tuple[int, int, int]]]) -> list[Any]:
        """The same where an address is no multiple of the size of an element. Raises: UsageError without one."""
        pieces = [
            [self.elements(addresses[tensor] + start * self._itemsize, stop - start) for tensor, start, stop in runs]
            for runs in table
        ]
        return [each if len(each) > 1 else each[0] for each in pieces]
