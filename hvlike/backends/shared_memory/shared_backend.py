"""The shared backend: ranks of one node reduce and exchange through a small region of shared memory.

Reductions are prepared once for the lengths of their tensors (staging.py, cma.py). Bytes move through the same
slots, or from one rank's memory to another's (transfer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.cma import CmaMemory, CmaReduction
from hvlike.backends.shared_memory.in_place_shm import (
    AllocationPlace,
    InlineReduction,
    InPlaceReduction,
    SharedAllocations,
    place_word,
)
from hvlike.backends.shared_memory.leader import FlatBuffer, LeaderByCma, LeaderByStaging, NodeReduction
from hvlike.backends.shared_memory.region import ACTIVE, ADDRESSES, Region
from hvlike.backends.shared_memory.schedule import SMALLEST_SHARE, Chunk, assign, deal
from hvlike.backends.shared_memory.staging import Results, StagedReduction
from hvlike.backends.shared_memory.transfer import alltoall, gather, gather_at_once
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine

T = TypeVar("T")

STAGED_CHUNK_BYTES = 128 << 10  # Half a slot: with more chunks the ranks wait less for the first one
SHORT_BYTES = 64 << 10

# Beside lengths and owners, in the stamp of a reduction that leaves its results with owners.
_STAMPED = {Results.TO_OWNER: 1 << 60, Results.PARTIAL: 1 << 61}

MOST_KNOWN = 64  # Kinds of work that are kept; with one more all are prepared anew


class SharedReduction:
    """Reduces tensors of the same lengths each time. All ranks prepare and run the same, in the same order.

        run    post what this rank does    one of three ways                            the number of active ranks
                                           staged: nobody waits before the first chunk
                                           CMA: arrive, reduce in the peers' memory, depart
                                           in place: the same, in shared allocations

    Which way is decided when the work is prepared: it is staged, unless the tensors are short on average and the ranks
    reach each other's memory. Staging took 0.75 to 1.03 of the time of CMA for all but many short tensors, where CMA
    was 1.4 times faster. In place: tensors in shared allocations that all ranks have at the same place.
    """

    def __init__(
        self,
        sync: WorkSync,
        allocations: SharedAllocations,
        arithmetic: Arithmetic,
        lengths: Sequence[int],
        stamp: int,
        make_staged: Callable[[Sequence[int], Arithmetic], StagedReduction],
        cma: CmaReduction | None,
    ) -> None:
        """stamp: of this work, the same on all ranks. make_staged: makes what stages tensors of such lengths. cma: None
        for tensors that are staged.
        """
        self._sync = sync
        self._allocations = allocations
        self._shared = allocations.by_start
        self._arithmetic = arithmetic
        self._lengths = list(lengths)
        self._sizes = [length * arithmetic.itemsize for length in lengths]
        self._stamp = stamp
        self._make_staged = make_staged
        self._cma = cma
        self._staged = None if cma is not None else make_staged(lengths, arithmetic)

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        """See SharedReduction (backends/base.py)."""
        sync, word, places = self._sync, 0, None
        region = sync.region
        if self._shared:
            places = self._allocations.places(addresses, self._sizes)
            word = place_word(places)
        if self._cma is not None:
            self._cma.post(addresses)
        number = sync.begin(self._stamp, word, active=1 if active is None else active)
        if places or self._staged is None:
            work = self._together(addresses, number, places or {}, tensors)
        else:
            work = self._staged.run(addresses)
        step = region.quiet.run
        try:
            while True:
                yield step(next, work)
        except StopIteration:
            # All have posted: this rank has what they contributed.
            counted, word = 0, ACTIVE + number % 2
            for counters in region.counters:
                counted += counters.words[word]
            return counted
        except BaseException as error:
            # Also one that comes from outside ends the work: it tells the peers.
            work.throw(error)
            raise

    def _together(
        self, addresses: list[int], number: int, places: dict[int, AllocationPlace], tensors: Sequence[torch.Tensor]
    ) -> Coroutine[None]:
        """Reduce where all ranks have to arrive first."""
        sync = self._sync
        with sync.exposed(tensors, number):
            yield from sync.arrive(number)
            if places and sync.region.is_same_place(number):
                yield from self._in_place(addresses, number, places)
            elif self._cma is not None:
                self._cma.begin(number)
                yield from sync.reduce_unstaged(self._cma, number)
            else:
                assert self._staged is not None
                yield from self._staged.run(addresses)

    def _in_place(self, addresses: list[int], number: int, places: dict[int, AllocationPlace]) -> Coroutine[None]:
        """Reduce those in shared allocations where they are, and stage the others."""
        sync, arithmetic = self._sync, self._arithmetic
        copies = [self._allocations.copies(place, self._sizes[each], arithmetic) for each, place in places.items()]
        reduction = InPlaceReduction(sync.region, arithmetic, copies, number % sync.region.ranks)
        reduction.begin(number)
        yield from sync.reduce_unstaged(reduction, number)
        others = [each for each in range(len(addresses)) if each not in places]
        if others:
            staged = self._make_staged([self._lengths[each] for each in others], arithmetic)
            yield from staged.run([addresses[each] for each in others])


class SharedBackend:
    """Collectives among the ranks of one node; every call in the same order on all of them."""

    name = "SHARED"

    def __init__(self, region: Region, allocations: SharedAllocations, memory: CmaMemory) -> None:
        """memory: of the ranks, where the system lets them reach each other."""
        self._region = region
        self._allocations = allocations
        self.memory = memory  # Decides which work is done by cross-memory attach
        self._sync = WorkSync(region)
        self.gather = partial(gather_at_once, self._sync, memory)
        self.alltoall = partial(alltoall, self._sync, memory)
        self._prepared: dict[object, SharedReduction] = {}
        self._partial: dict[object, tuple[StagedReduction, list[Chunk], int]] = {}

    def count_active(self, active: int) -> Coroutine[int]:
        """Work of which nothing is left to do once all ranks have arrived."""
        number = self._sync.begin(0, 0, active=active)
        yield from self._sync.arrive(number)
        return self._sync.count_active(number)

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> SharedReduction:
        stamp = arithmetic.stamp(lengths)
        cma = None
        if self.memory.suits([length * arithmetic.itemsize for length in lengths]):
            cma = CmaReduction(self._region, self.memory, arithmetic, lengths)
        return SharedReduction(self._sync, self._allocations, arithmetic, lengths, stamp, self._stage, cma)

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        tensors = [tensor for tensor in tensors if len(tensor)]
        if not tensors:
            return
        lengths = list(map(len, tensors))
        key = (*lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = _keep(self._prepared, key, self.prepare(lengths, arithmetic))
        yield from prepared.run(list(map(arithmetic.address, tensors)), None, tensors)

    def by_leader(self, lengths: Sequence[int], arithmetic: Arithmetic, flat: FlatBuffer) -> NodeReduction:
        """What reduces tensors of these lengths on this node and, through its first rank, on others."""
        if self.memory.ranks and len(lengths) <= ADDRESSES:
            return LeaderByCma(self._sync, self.memory, flat, arithmetic, tuple(lengths))
        chunks = [chunk._replace(owner=0) for chunk in self._deal(lengths, arithmetic)]
        staged = StagedReduction(self._sync, arithmetic, chunks, Results.PARTIAL)
        return LeaderByStaging(self._sync, flat, staged, arithmetic.stamp([*lengths, 0]))

    def inline(self, arithmetic: Arithmetic, length: int, stamp: int) -> InlineReduction:
        """What reduces one tensor of this length, on which all ranks agree elsewhere; stamp: of this kind of call."""
        chunks = self._deal([length], arithmetic)
        staged = StagedReduction(self._sync, arithmetic, chunks, compares=False)
        return InlineReduction(self._sync, self._allocations, staged, arithmetic, length, stamp)

    def reduce_partially(
        self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic, owner: int | None
    ) -> Coroutine[list[Chunk]]:
        """Leave the partial results with the owners of chunks of one tensor; owner: one for all, None: in turn."""
        owners = None if owner is None else [owner] * len(tensors)
        return (yield from self._reduce_for(tensors, owners, arithmetic, Results.PARTIAL))

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic, *, partial: bool = False
    ) -> Coroutine[None]:
        """See Backend; partial: leave what `arithmetic.continuation` goes on with."""
        yield from self._reduce_for(tensors, owners, arithmetic, Results.PARTIAL if partial else Results.TO_OWNER)

    def gather_chunks(self, tensors: Sequence[torch.Tensor], chunks: Sequence[Chunk]) -> Coroutine[None]:
        parts = [(tensors[tensor][start:stop], chunk.owner) for chunk in chunks for tensor, start, stop in chunk.runs]
        yield from gather(self._sync, parts)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _deal(self, lengths: Sequence[int], arithmetic: Arithmetic, *, short: int = SHORT_BYTES) -> list[Chunk]:
        itemsize = arithmetic.itemsize
        largest = min(STAGED_CHUNK_BYTES, self._region.chunk) // itemsize
        smallest = SMALLEST_SHARE // itemsize
        return deal(lengths, self._region.ranks, largest, smallest, min(short // itemsize, largest))

    def _stage(self, lengths: Sequence[int], arithmetic: Arithmetic) -> StagedReduction:
        return StagedReduction(self._sync, arithmetic, self._deal(lengths, arithmetic))

    def _reduce_for(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int] | None, arithmetic: Arithmetic, results: Results
    ) -> Coroutine[list[Chunk]]:
        """Reduce tensors for the owners of their chunks; owners: of each tensor, None: in turn."""
        lengths = list(map(len, tensors))
        if not any(lengths):
            return []
        key = (*lengths, owners and tuple(owners), arithmetic.dtype, arithmetic.op, arithmetic.factors, results)
        known = self._partial.get(key)
        if known is None:
            if owners is None:
                chunks = self._deal(lengths, arithmetic, short=0)
            else:
                chunks = assign(lengths, owners, self._region.chunk // arithmetic.itemsize)
            staged = StagedReduction(self._sync, arithmetic, chunks, results)
            stamp = arithmetic.stamp([*lengths, *(owners or ()), _STAMPED[results]])
            known = _keep(self._partial, key, (staged, chunks, stamp))
        self._sync.begin(known[2], 0)
        addresses = list(map(arithmetic.address, tensors))
        yield from self._region.quiet.drive(known[0].run(addresses))
        return known[1]


def _keep(known: dict[object, T], key: object, made: T) -> T:
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = made
    return made
