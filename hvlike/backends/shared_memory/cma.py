"""Reductions of tensors in the ranks' own memory, which the owner of a chunk reads and writes through the system.

    rank 0   arrive   read A1, reduce it into A0, write A1   read C1, ...   depart
    rank 1   arrive   read B0, reduce it into B1, write B0   read D0, ...   depart

Chunk A has the copies A0 and A1 in the tensors of ranks 0 and 1. Nothing is staged and no chunk is waited for: no rank
touches a tensor before all have arrived with the same work, and none leaves before all have departed. What is read
comes from memory, where backward has left it, and not, as what a peer has just staged, from another core's cache.

Short tensors make chunks together: one call of the system gathers them from a peer into scratch memory, one from this
rank itself, and two bring the result back. That is faster than to copy each by itself, in Python or in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.shared_memory.region import ADDRESSES, AddressView, Region
from hvlike.backends.shared_memory.schedule import CHUNK_BYTES, SMALLEST_SHARE, cut_together, fitting
from hvlike.backends.shared_memory.work_sync import WorkStealing
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.memory.process_memory import MOST_RANGES, ROW_BYTES, ProcessMemory, Ranges

SHORT_BYTES = 64 << 10  # Of a tensor: shorter ones make chunks together
SHORT_MEAN = 32 << 10  # Bytes of a tensor, on average: longer ones are staged faster
LEAST_WORK, CROWDED_LEAST_WORK = 512 << 10, 16 << 20
"""Bytes of all tensors together; less gains nothing, least of all where ranks have to take turns on a core."""

PASSES = 8  # How many chunks are reduced before other coroutines have a turn


class CmaMemory:
    """The memories of a backend's ranks, and scratch for what is read from them."""

    def __init__(self, processes: Sequence[int], *, crowded: bool = False) -> None:
        """processes: of the ranks, in order; none where they cannot be reached. crowded: ranks share cores."""
        self.least_bytes = CROWDED_LEAST_WORK if crowded else LEAST_WORK  # Less is staged
        self.ranks = [ProcessMemory(process) for process in processes]
        self._scratch: list[tuple[Any, int]] = []

    def suits(self, sizes: Sequence[int]) -> bool:
        """Whether tensors of so many bytes are best reduced in the peers' memory: the same on every rank."""
        total = sum(sizes)
        return bool(self.ranks) and self.least_bytes <= total < SHORT_MEAN * len(sizes) and len(sizes) <= ADDRESSES

    def scratch(self) -> list[tuple[Any, int]]:
        """Memory for one chunk of each rank, as bytes, and its address."""
        if not self._scratch:
            # Not in inference mode, whose tensors can be written nowhere else.
            with torch.inference_mode(False):
                made = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu").numpy() for _ in self.ranks]
            self._scratch = [(each, each.ctypes.data) for each in made]
        return self._scratch


class CmaChunk(NamedTuple):
    """A run of one tensor's elements, or several short tensors."""

    row: int  # Of its first range in a table of all
    ranges: int  # How many it has
    elements: int  # Of all of them
    nbytes: int


class _Member(NamedTuple):
    """A rank of the backend as a reduction sees it."""

    memory: ProcessMemory
    addresses: memoryview  # Of its tensors, as the rank posts them; shared memory
    ranges: Ranges  # Where all chunks lie in them
    scratch: int  # The address of what is read from it
    copy: Piece  # The same as elements


Layout = tuple[list[CmaChunk], Array, Array, list[int]]
"""Chunks; for all their ranges one after another the tensor, the byte in it at which they begin, and their bytes."""


class CmaTables:
    """Where the chunks of tensors lie on every rank of a node."""

    def __init__(self, region: Region, memory: CmaMemory, arithmetic: Arithmetic, tensors: int, chunks: Layout) -> None:
        """tensors: how many there are."""
        _, self._index, self._starts, sizes = chunks
        self.members = [
            _Member(reached, counters.addresses[:tensors], Ranges(sizes), address, arithmetic.over(room))
            for reached, counters, (room, address) in zip(memory.ranks, region.counters, memory.scratch(), strict=True)
        ]
        self._posted = np.asarray(region.mine.addresses)[:tensors]
        self._said = [b""] * len(self.members)

    def post(self, addresses: Sequence[int]) -> None:
        """Say where this rank's tensors lie, before it posts the work."""
        self._posted[:] = addresses

    def locate(self) -> None:
        """Look where the tensors lie; all ranks have arrived, and posted it."""
        for rank, member in enumerate(self.members):
            said = member.addresses.tobytes()
            if said != self._said[rank]:
                # Mostly they are where they were the last time.
                self._said[rank] = said
                np.add(np.frombuffer(said, np.uint64)[self._index], self._starts, out=member.ranges.addresses)


class CmaReduction(CmaTables):
    """The chunks that this rank reduces of tensors of these lengths, at the addresses that the ranks post."""

    def __init__(self, region: Region, memory: CmaMemory, arithmetic: Arithmetic, lengths: Sequence[int]) -> None:
        """lengths: in elements."""
        chunks = layout(tuple(lengths), arithmetic.itemsize, region.ranks)
        super().__init__(region, memory, arithmetic, len(lengths), chunks)
        self._own = AddressView(arithmetic)
        self._claims = WorkStealing(region, chunks[0], 0)
        self._rank = region.rank
        self._join = arithmetic.steps().join
        self._mine = self.members[region.rank]
        self._peers = [self.members[peer] for peer in region.peers]

    def begin(self, number: int) -> None:
        """Begin the work of this number; all ranks have arrived."""
        self._claims.begin(number)
        self.locate()

    @property
    def unfinished(self) -> bool:
        """Whether chunks may be left for this rank."""
        return self._claims.unfinished

    def advance(self) -> bool:
        """Reduce the next few chunks, if any can be taken now; the caller silences numpy. Raises: OSError."""
        peers, mine = self._peers, self._mine
        chunks = self._claims.take(PASSES)
        for row, count, elements, nbytes in chunks:
            place = ROW_BYTES * row
            for memory, _, ranges, scratch, _ in peers:
                memory.gather(ranges.start + place, count, scratch, nbytes)
            if count == 1:
                source = int(mine.ranges.addresses[row])
                own = self._own.elements(source, elements)
            else:
                source, own = mine.scratch, mine.copy[:elements]
                mine.memory.gather(mine.ranges.start + place, count, source, nbytes)
            self._join(self._rank, own, [member.copy[:elements] for member in peers])
            for memory, _, ranges, _, _ in peers:
                memory.scatter(ranges.start + place, count, source, nbytes)
            if count > 1:
                mine.memory.scatter(mine.ranges.start + place, count, source, nbytes)
        return bool(chunks)


@functools.lru_cache(maxsize=64)
def layout(lengths: tuple[int, ...], itemsize: int, ranks: int, chunk_bytes: int = CHUNK_BYTES) -> Layout:
    """Cut tensors of these lengths, the same from step to step, into chunks for so many ranks."""
    largest, smallest = chunk_bytes // itemsize, SMALLEST_SHARE // itemsize
    short = SHORT_BYTES // itemsize
    together = fitting(sum(length for length in lengths if length < short), largest, smallest, ranks)
    elements = fitting(sum(length for length in lengths if length >= short), largest, smallest, ranks)
    cuts = cut_together(lengths, elements, short, max(together, short), MOST_RANGES)
    chunks, row = [], 0
    for runs in cuts:
        size = sum(stop - start for _, start, stop in runs)
        chunks.append(CmaChunk(row, len(runs), size, size * itemsize))
        row += len(runs)
    ranges = [run for runs in cuts for run in runs]
    index = np.array([piece for piece, _, _ in ranges], np.intp)
    starts = np.array([start * itemsize for _, start, _ in ranges], np.uint64)
    return chunks, index, starts, [(stop - start) * itemsize for _, start, stop in ranges]
