"""A reduction of two ranks with nothing around it: copies, additions and two flags. What Python can do on this machine.

    rank 0   stage B   reduce A   stage D   take B   reduce C  ...
    rank 1   stage A   reduce B   stage C   take A   reduce D  ...      (A, C owned by 0; B, D by 1)

As the shared plane does it, but without names, checks, hooks, reports, other threads or ends, for two ranks of one node
and what numpy computes. Where hvlike misses a goal, this says whether the library or the machine is in the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvlike
from hvlike.collectives.context import current
from hvlike.errors import HvlikeError, UsageError
from hvlike.planes.chunks import SLOTS, SMALLEST_SHARE, cut, fitting
from hvlike.transport.dtypes import Array
from hvlike.transport.semaphore import X86

BARE = "bare loop"

_CHUNK_BYTES = 128 << 10
_WORDS_BYTES = 4096
_STAGED, _REDUCED = 0, 8
"""Words of a rank, on lines of their own: how many chunks it has staged, and reduced."""

_STARTS = range(_WORDS_BYTES, _WORDS_BYTES + SLOTS * _CHUNK_BYTES, _CHUNK_BYTES)

_MOST_LOOKS = 1 << 28
"""Minutes: the other rank will not come any more."""


class BareLoop:
    """Two ranks and the memory they share; each call on both of them."""

    def __init__(self) -> None:
        """Collective. Raises: UsageError unless there are two ranks, on one node, of a machine that orders stores."""
        if hvlike.size() != 2 or hvlike.local_size() != 2 or not X86:
            raise UsageError(
                f"--bare is for two ranks on one node of x86 cores; there are {hvlike.size()} ranks, "
                f"{hvlike.local_size()} of them on this node."
            )
        self._rank = rank = hvlike.rank()
        nbytes = _WORDS_BYTES + SLOTS * _CHUNK_BYTES
        self._memory = hvlike.empty_shared(nbytes, dtype=torch.uint8)
        found = current().fabric.allocations.find(self._memory.data_ptr(), nbytes)
        if found is None:
            raise HvlikeError(f"rank {rank}: the tensor of empty_shared is not among the shared allocations.")
        copies = [found[0].copy(each) for each in (0, 1)]
        self._mine, self._peer = (copies[each][:_WORDS_BYTES].data.cast("Q") for each in (rank, 1 - rank))
        self._slots = [[copy[start : start + _CHUNK_BYTES] for start in _STARTS] for copy in copies]
        self._mine[_STAGED] = self._mine[_REDUCED] = 0
        hvlike.barrier()

    def chunks(self, arrays: Sequence[Array]) -> list[Array]:
        """Cut flat arrays of one dtype; dealt to the ranks in turn."""
        itemsize = arrays[0].itemsize
        lengths = [len(each) for each in arrays]
        elements = fitting(sum(lengths), _CHUNK_BYTES // itemsize, SMALLEST_SHARE // itemsize, 2)
        return [arrays[index][start:stop] for index, start, stop in cut(lengths, elements)]

    def reduce(self, chunks: Sequence[Array], factor: float | None = None) -> None:
        """Write the sum of both ranks' chunks, times a factor, to both.

        Raises: HvlikeError if the other rank does not come.
        """
        rank, mine, peer = self._rank, self._mine, self._peer
        storage = chunks[0].dtype
        # What this rank stages lies in its own slots, what the peer stages for it in the peer's.
        staging, copies = ([slot.view(storage) for slot in self._slots[each]] for each in (rank, 1 - rank))
        own, foreign = chunks[rank::2], chunks[1 - rank :: 2]
        staged, taken, reduced = mine[_STAGED], mine[_STAGED], mine[_REDUCED]
        to_stage, to_reduce, looks = iter(foreign), iter(own), 0
        to_take, left = iter(foreign), len(foreign) + len(own)
        last_staged, last_reduced = staged + len(foreign), reduced + len(own)
        while left:
            looks += 1
            if staged < last_staged and staged - taken < SLOTS:
                chunk = next(to_stage)
                staging[staged % SLOTS][: len(chunk)] = chunk
                staged += 1
                mine[_STAGED] = staged
            if reduced < last_reduced and peer[_STAGED] > reduced:
                chunk = next(to_reduce)
                copy = copies[reduced % SLOTS][: len(chunk)]
                chunk += copy
                if factor is not None:
                    chunk *= factor
                copy[:] = chunk
                reduced += 1
                mine[_REDUCED] = reduced
                left, looks = left - 1, 0
            if taken < staged and peer[_REDUCED] > taken:
                chunk = next(to_take)
                chunk[:] = staging[taken % SLOTS][: len(chunk)]
                taken += 1
                left, looks = left - 1, 0
            if looks > _MOST_LOOKS:
                raise HvlikeError(f"rank {rank}: the other rank has left the bare loop.")
