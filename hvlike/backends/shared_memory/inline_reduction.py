"""Reductions of one large tensor that begin as soon as all ranks have agreed to them on the board.

    post     where the tensor of this rank lies, if that is a shared allocation; then the ranks agree
    begin    after a yes: all have arrived, and the tensor is reduced in place, or staged

What depends on the kind of the call alone is prepared once; what depends on a place in shared memory, once for it.
"""

from __future__ import annotations

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine

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
            number = sync.begin_posted()
            reduction, self._in_place = self._in_place, None
            if reduction is not None and sync.region.is_same_place(number):
                reduction.begin(number)
                work = sync.reduce_unstaged(reduction, number)
        return sync.region.quiet.drive(work or self._staged.run([address]))

    def forget(self) -> None:
        """The ranks have not agreed: nothing is kept of the tensor's memory."""
        self._in_place = None
