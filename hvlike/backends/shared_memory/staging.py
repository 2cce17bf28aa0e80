"""Reductions through the staging slots of a region.

The tensors stay where they are. Of a chunk that it does not own a rank stages its copy. The owner reduces all copies
with its own part and writes the result over the staged copy of its first peer, where all peers take it:

    rank 0   stage B   reduce A   stage D   take B   reduce C  ...
    rank 1   stage A   reduce B   stage C   take A   reduce D  ...      (A, C owned by 0; B, D by 1)

Every element is reduced on exactly one rank, in the order of the ranks, so the results are bitwise the same everywhere.
The lengths decide chunks and slots: these are computed once. The addresses decide where the chunks lie: these are
computed again only where an address has changed. Short tensors share a chunk: one call gathers them into the slot.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.shared_memory.region import REDUCED, AddressView, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS, Chunk
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine, Wait

PASSES = 16  # How often a reduction moves something before it lets other coroutines have a turn


class Results(enum.Enum):
    """Which ranks get the result of a reduction."""

    TO_ALL = "every rank"
    TO_OWNER = "the owner of the chunk"
    PARTIAL = "the owner of the chunk, without divisor and postscale"


Group = tuple[Piece, list[Piece]] | None
"""Scratch for a chunk of several tensors, whole and the part of each; None where a chunk is part of one tensor."""


class _Own(NamedTuple):
    """A chunk that this rank owns."""

    copies: list[list[Piece]]  # What the peers have staged, by turn modulo SLOTS
    group: Group


class _Foreign(NamedTuple):
    """A chunk that another rank owns."""

    owner: int
    place: int  # Among the chunks of its owner
    slots: tuple[list[Any], list[Any]]  # By turn modulo SLOTS: where this rank stages it, and where its result is taken
    group: Group


class StagedReduction:
    """Reduces tensors of the same lengths, over and over; every rank of the node calls `run` in the same order."""

    def __init__(
        self,
        sync: WorkSync,
        arithmetic: Arithmetic,
        chunks: Sequence[Chunk],
        results: Results = Results.TO_ALL,
        *,
        compares: bool = True,
    ) -> None:
        """chunks: none longer than a slot. compares: makes sure first that the peers are at the same work."""
        region = self._region = sync.region
        self._sync = sync
        self._compare = sync.compare if compares else None
        self._arithmetic = arithmetic
        self._steps = arithmetic.steps(partial=results is Results.PARTIAL)
        self._delivers = results is Results.TO_ALL
        self._memory = AddressView(arithmetic)
        self._counts = [0] * region.ranks
        self._own_runs = [chunk.runs for chunk in chunks if chunk.owner == region.rank]
        self._foreign_runs = [chunk.runs for chunk in chunks if chunk.owner != region.rank]
        self._own: list[_Own] = []
        self._foreign: list[_Foreign] = []
        self._find_slots(chunks)
        self._addresses: list[int] = []
        self._elements: list[list[Any]] = [[], []]  # This rank's memory of the chunks; a list for several tensors
        self._readers = [
            [counters for each, counters in enumerate(region.counters) if each != owner]
            if first_peer(owner) == region.rank != owner
            else []
            for owner in range(region.ranks)
        ]
        """For each owner: who takes its results, where they are in this rank's slots."""

    def _find_slots(self, chunks: Sequence[Chunk]) -> None:
        """Slices of the slots, one list for all chunks of the same owner and size."""
        region, slots = self._region, self._region.slots(self._arithmetic)
        known: dict[tuple[int, int], Any] = {}
        for chunk in chunks:
            owner, size = chunk.owner, chunk.elements
            if (owner, size) not in known:
                tables = slots.copies if owner == region.rank else (slots.staged[owner], slots.results[owner])
                known[owner, size] = [[slot[:size] for slot in table] for table in tables]
            if owner == region.rank:
                self._own.append(_Own(known[owner, size], self._group(chunk)))
            else:
                place = self._counts[owner]
                self._foreign.append(_Foreign(owner, place, known[owner, size], self._group(chunk)))
            self._counts[owner] += 1

    def _group(self, chunk: Chunk) -> Group:
        if len(chunk.runs) == 1:
            return None
        scratch = self._region.scratch(self._arithmetic)
        ends = [0, *accumulate(stop - start for _, start, stop in chunk.runs)]
        return scratch[: ends[-1]], [scratch[first:last] for first, last in pairwise(ends)]

    def run(self, addresses: list[int]) -> Coroutine[None]:
        """Reduce the tensors that begin at these addresses, contiguous in host memory and held by the caller, who
        silences numpy and begins at once.
        Raises: MismatchError where a peer is at other work; HorovodInternalError where a peer has given the region up.
        """
        if addresses != self._addresses:
            self._addresses = []
            self._elements = self._memory.chunks(addresses, self._own_runs, self._foreign_runs)
            self._addresses = addresses[:]
        turns = self._region.turns
        bases = turns[:]
        for owner, count in enumerate(self._counts):
            turns[owner] += count
        return self._move(bases)

    def _until_received(self) -> Coroutine[None]:
        """Wait until the peers have what an alltoall has put into this rank's slots."""
        region = self._region
        while any(region.counters[peer].received[region.rank] < region.mine.passed[peer] for peer in region.peers):
            self._sync.check_peers()
            yield Wait.NOTIFY

    # All in one frame: where the caches are cold, as after a backward pass, a call costs more than most statements.
    def _move(self, bases: list[int]) -> Coroutine[None]:
        """Stage, reduce and take chunk after chunk; bases: the turn of the first chunk of each owner."""
        region, own, foreign, readers, delivers = self._region, self._own, self._foreign, self._readers, self._delivers
        mine, counters, others, order, rank = region.mine, region.counters, region.others, region.order, region.rank
        gather, join, deliver, factor = self._steps
        own_elements, foreign_elements = self._elements
        compare, multiply, checks = self._compare, np.multiply, region.spin.counter_checks
        staged = reduced = taken = looks = moves = 0
        try:
            if any(mine.passed):
                yield from self._until_received()
            while taken < len(foreign) or reduced < len(own):
                looks += 1
                if staged < len(foreign):
                    owner, place, (slots, _), group = foreign[staged]
                    turn = bases[owner] + place
                    needed = turn - SLOTS + 1
                    free = needed <= 0 or counters[owner].words[REDUCED] >= needed
                    for reader in readers[owner]:
                        free = free and (needed <= 0 or reader.taken[owner] >= needed)
                    if free:
                        if group is None:
                            slots[turn % SLOTS][...] = foreign_elements[staged]
                        else:
                            gather(foreign_elements[staged], out=slots[turn % SLOTS])
                        order()
                        mine.staged[owner] = turn + 1
                        staged, looks = staged + 1, 0
                if reduced < len(own):
                    turn, there = bases[rank] + reduced, True
                    for other in others:
                        there = there and other.staged[rank] > turn
                    if there:
                        order()
                        if compare is not None:
                            compare = compare()
                        copies, group = own[reduced]
                        whole: Any = (
                            own_elements[reduced] if group is None else gather(own_elements[reduced], out=group[0])
                        )
                        join(rank, whole, copies[turn % SLOTS])
                        order()
                        mine.words[REDUCED] = turn + 1
                        if group is not None:
                            scatter(own_elements[reduced], group[1])
                        reduced, looks = reduced + 1, 0
                if taken < staged:
                    owner, place, (_, results), group = foreign[taken]
                    turn = bases[owner] + place
                    if counters[owner].words[REDUCED] > turn:
                        order()
                        if delivers:
                            whole = foreign_elements[taken] if group is None else group[0]
                            if deliver is not None:
                                deliver(whole, results[turn % SLOTS])
                            elif factor is not None:
                                multiply(results[turn % SLOTS], factor, whole)
                            else:
                                whole[...] = results[turn % SLOTS]
                            if group is not None:
                                scatter(foreign_elements[taken], group[1])
                            order()
                        mine.taken[owner] = turn + 1
                        taken, looks = taken + 1, 0
                if not looks:
                    for bell in region.sleepers:
                        if bell.asleep[0]:
                            bell.notify_if_sleeping()
                    moves += 1
                    if moves % PASSES == 0:
                        yield Wait.AGAIN
                elif looks % checks == 0:
                    if looks == checks:
                        # A peer that was about to sleep when it was looked at is woken now, or has looked once more.
                        region.notify_if_sleeping()
                    self._sync.check_peers()
                    yield Wait.NOTIFY
        except GeneratorExit:
            # The loop ends a job that cannot be completed: messages tell the other ranks why.
            raise
        except BaseException as error:
            # The peers would wait for these chunks for ever.
            region.give_up(error)
            raise
        finally:
            region.notify_if_sleeping()


def scatter(targets: Sequence[Any], parts: Sequence[Piece]) -> None:
    """Copy the parts of a chunk of several tensors to where they belong."""
    for target, part in zip(targets, parts, strict=True):
        target[...] = part
