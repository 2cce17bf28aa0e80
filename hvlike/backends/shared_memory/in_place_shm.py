"""Reductions of tensors that lie in shared allocations: read and written in place on all ranks, nothing is staged.

    rank 0   arrive   reduce A into A0 and A1   reduce C into C0 and C1   depart
    rank 1   arrive   reduce B into B0 and B1   reduce D into D0 and D1   depart

Chunk A has the copies A0 in the tensor of rank 0 and A1 in that of rank 1; its owner reads and writes both. No rank
touches a copy before all have arrived with the same work, and none leaves before all have departed.

An `InlineReduction` is that of one large tensor which begins as soon as all ranks have agreed to it on the board: in
place where all have posted a shared allocation, else staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.schedule import cut
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkStealing, WorkSync
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.allocations import Allocation, Allocations

PASSES = 16


class AllocationPlace(NamedTuple):
    """Where a tensor lies: so many bytes after the start of this rank's copy of an allocation."""

    allocation: Allocation
    offset: int


class SharedAllocations:
    """The shared allocations as one backend sees them."""

    def __init__(self, allocations: Allocations, ranks: Sequence[int]) -> None:
        """ranks: of the world, those of the backend, in its order."""
        self.allocations = allocations
        self.by_start = allocations.by_start
        self._ranks = tuple(ranks)

    def places(self, addresses: Sequence[int], sizes: Sequence[int]) -> dict[int, AllocationPlace]:
        """Which of these contiguous tensors lie in an allocation of all ranks, and where; sizes in bytes."""
        found: dict[int, AllocationPlace] = {}
        for index, (address, nbytes) in enumerate(zip(addresses, sizes, strict=True)):
            place = self.allocations.find(address, nbytes)
            if place is not None and nbytes and self.has(place[0]):
                found[index] = AllocationPlace(*place)
        return found

    def has(self, allocation: Allocation) -> bool:
        return allocation.includes(self._ranks)

    def copies(self, place: AllocationPlace, nbytes: int, arithmetic: Arithmetic) -> list[Piece]:
        """The tensor of so many bytes at the same place on each rank of the backend."""
        stop = place.offset + nbytes
        return [arithmetic.over(place.allocation.copy(rank)[place.offset : stop]) for rank in self._ranks]


def place_word(places: dict[int, AllocationPlace]) -> int:
    """A number that says which tensors lie where, for the ranks to compare; 0: none lies in a shared allocation."""
    if not places:
        return 0
    described = tuple((index, *place.allocation.number, place.offset) for index, place in places.items())
    return hash(described) & 0x7FFFFFFFFFFFFFFF | 1 << 63


class InPlaceReduction:
    def __init__(
        self, region: Region, arithmetic: Arithmetic, tensors: Sequence[Sequence[Piece]], first_owner: int
    ) -> None:
        """tensors: for each tensor its copies on all ranks of the backend; first_owner: of the first chunk."""
        rank = region.rank
        runs = cut([len(copies[0]) for copies in tensors], region.chunk // arithmetic.itemsize)
        self._claims = WorkStealing(region, runs, first_owner)
        steps = arithmetic.steps()
        self._join = steps.join
        self._scales = steps.deliver is not None or steps.factor is not None
        # In the order of the ranks, on whichever rank; the first two may be swapped, as where copies are staged.
        self._tensors: list[list[Any]] = [
            [each[rank], *each[:rank], *each[rank + 1 :]] if rank < 2 else [*each] for each in tensors
        ]

    @property
    def tensors(self) -> int:
        return len(self._tensors)

    def begin(self, number: int) -> None:
        """Begin the work of this number, on the same tensors each time; all ranks have arrived."""
        self._claims.begin(number)

    @property
    def unfinished(self) -> bool:
        return self._claims.unfinished

    def advance(self) -> bool:
        """Reduce the next few chunks, if any can be taken now; the caller silences numpy."""
        runs = self._claims.take(PASSES)
        for tensor, start, stop in runs:
            first, *others = [copy[start:stop] for copy in self._tensors[tensor]]
            self._join(0, first, others)
            # Where nothing is scaled the first of the others has the result already.
            for other in others if self._scales else others[1:]:
                other[...] = first
        return bool(runs)


MOST_WORKS = 64
"""Places that are kept for one allocation; with one more all are prepared anew."""

AS_SHARED = 1
"""A bit in the number that ranks compare: the tensor is reduced where it lies."""


class InlineReduction:
    """Calls of one kind: tensors of one dtype and length under one arithmetic."""

    def __init__(
        self,
        sync: WorkSync,
        allocations: SharedAllocations,
        staged: StagedReduction,
        arithmetic: Arithmetic,
        length: int,
        stamp: int,
    ) -> None:
        """stamp: of this kind of call, the same on all ranks."""
        self._sync = sync
        self._allocations = allocations
        self._staged = staged
        self._arithmetic = arithmetic
        self._stamp = stamp
        self._nbytes = length * arithmetic.itemsize
        self._in_place: InPlaceReduction | None = None

    def is_shared(self, address: int) -> bool:
        """Whether a tensor at this address lies in a shared allocation."""
        return (
            bool(self._allocations.by_start) and self._allocations.allocations.find(address, self._nbytes) is not None
        )

    def post(self, address: int) -> None:
        """Say where this rank's tensor lies, in a shared allocation, before it offers to begin."""
        found = self._allocations.allocations.find(address, self._nbytes)
        if found is None:
            # Another thread has just dropped it.
            self._in_place = None
            self._sync.post(self._stamp, 0)
            return
        # The entry holds this object, so that the id stays what it is.
        works, key = found[0].works, (found[1], id(self))
        if key not in works:
            if len(works) >= MOST_WORKS:
                works.clear()
            works[key] = (*self._prepare(AllocationPlace(*found)), self)
        self._in_place, word, _ = works[key]
        self._sync.post(self._stamp, word)

    def _prepare(self, place: AllocationPlace) -> tuple[InPlaceReduction | None, int]:
        """What reduces a place of a shared allocation, and the word that says which; None, 0 if not all have it."""
        if not self._allocations.has(place.allocation):
            return None, 0
        copies = self._allocations.copies(place, self._nbytes, self._arithmetic)
        return InPlaceReduction(self._sync.region, self._arithmetic, [copies], 0), place_word({0: place})

    def begin(self, address: int, *, shared: bool) -> Coroutine[None]:
        """The reduction of the tensor at this address, after all have agreed.

        shared: it was posted; address: of a contiguous tensor in host memory, which the caller holds.
        """
        sync, work = self._sync, None
        if shared:
            sync.number += 1
            number = sync.number
            reduction, self._in_place = self._in_place, None
            if reduction is not None and sync.region.is_same_place(number):
                reduction.begin(number)
                work = sync.reduce_unstaged(reduction, number)
        return sync.region.quiet.drive(work or self._staged.run([address]))

    def forget(self) -> None:
        """The ranks have not agreed: nothing is kept of the tensor's memory."""
        self._in_place = None
