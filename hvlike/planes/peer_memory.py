"""Reductions of tensors in the ranks' own memory, which the owner of a chunk reads and writes through the system.

    rank 0   arrive   read A1, reduce it into A0, write A1   read C1, ...   depart
    rank 1   arrive   read B0, reduce it into B1, write B0   read D0, ...   depart

Chunk A has the copies A0 and A1 in the tensors of ranks 0 and 1. Nothing is staged and no chunk is waited for: no rank
touches a tensor before all have arrived with the same work, and none leaves before all have departed. What is read
comes from memory, where backward has left it, and not, as what a peer has just staged, from another core's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.chunks import CHUNK_BYTES, SMALLEST_SHARE, cut, fitting
from hvlike.planes.claims import Claims
from hvlike.planes.region import ADDRESSES, Region
from hvlike.transport.process_memory import ProcessMemory

LEAST_BYTES = 64 << 10
"""Of a tensor: smaller ones are staged, in bundles where the caller has made some."""

LEAST_WORK, CROWDED_LEAST_WORK = 512 << 10, 16 << 20
"""Bytes of all such tensors together; less gains nothing, least of all where ranks have to take turns on a core."""

PASSES = 8
"""How many chunks are reduced before other routines have a turn."""


class PeerMemory:
    """The memories of a plane's ranks, and scratch for what is read from them."""

    def __init__(self, processes: Sequence[int], *, crowded: bool = False) -> None:
        """processes: their numbers, in the order of the ranks; none where the system does not let them be reached.

        crowded: ranks share cores; the same on all of them.
        """
        self._least = CROWDED_LEAST_WORK if crowded else LEAST_WORK
        self.ranks = [ProcessMemory(process) for process in processes]
        self._scratch: list[tuple[Any, int]] = []

    def within_reach(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Which of these are reduced here: the same on every rank for tensors of the same lengths."""
        if not self.ranks:
            return []
        near = [index for index, tensor in enumerate(tensors) if tensor.nbytes >= LEAST_BYTES][:ADDRESSES]
        return near if sum(tensors[index].nbytes for index in near) >= self._least else []

    def reaches(self, nbytes: int) -> bool:
        """The same for one tensor of so many bytes."""
        return bool(self.ranks) and nbytes >= max(LEAST_BYTES, self._least)

    def scratch(self) -> list[tuple[Any, int]]:
        """Memory for one chunk of each rank, as bytes, and its address."""
        if not self._scratch:
            # Not in inference mode, whose tensors can be written nowhere else.
            with torch.inference_mode(False):
                made = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu").numpy() for _ in self.ranks]
            self._scratch = [(each, each.ctypes.data) for each in made]
        return self._scratch


class PeerReduction:
    """The chunks that this rank reduces of one piece of work."""

    def __init__(
        self,
        region: Region,
        memory: PeerMemory,
        arithmetic: Arithmetic,
        pieces: Sequence[Piece],
        first_owner: int,
    ) -> None:
        """pieces: the elements of the tensors whose addresses the ranks have said; first_owner: of the first chunk."""
        ranks = region.ranks
        runs = _runs(tuple(map(len, pieces)), arithmetic.itemsize, ranks)
        self._claims = Claims(region, runs, first_owner)
        self._rank = region.rank
        self._arithmetic = arithmetic
        self._region = region
        scratch = memory.scratch()
        self._copies = [arithmetic.over(scratch[peer][0]) for peer in region.peers]
        self._reached = [(memory.ranks[peer], scratch[peer][1]) for peer in region.peers]

    def begin(self, pieces: Sequence[Piece], number: int) -> None:
        """Begin the work of this number, on pieces of the same lengths each time; all ranks have arrived."""
        count = len(pieces)
        self._claims.begin(number)
        self._pieces = pieces
        self._own = self._region.mine.addresses[:count].tolist()
        self._peers = [
            (memory, counters.addresses[:count].tolist(), scratch)
            for (memory, scratch), counters in zip(self._reached, self._region.others, strict=True)
        ]

    @property
    def unfinished(self) -> bool:
        """Whether chunks may be left for this rank."""
        return self._claims.unfinished

    def advance(self) -> bool:
        """Reduce the next few chunks, if any can be taken now; the caller silences numpy.

        Raises: OSError for a peer that is gone.
        """
        itemsize, peers = self._arithmetic.itemsize, self._peers
        runs = self._claims.take(PASSES)
        for piece, start, stop in runs:
            nbytes, offset = (stop - start) * itemsize, start * itemsize
            for memory, addresses, copy in peers:
                memory.read(addresses[piece] + offset, copy, nbytes)
            self._reduce(self._pieces[piece][start:stop], [copy[: stop - start] for copy in self._copies])
            result = self._own[piece] + offset
            for memory, addresses, _ in peers:
                memory.write(addresses[piece] + offset, result, nbytes)
        return bool(runs)

    def _reduce(self, own: Piece, copies: list[Piece]) -> None:
        """Reduce the own piece with the peers' copies, in the order of the ranks, as where copies are staged."""
        rank, kernel = self._rank, self._arithmetic.joining
        first, others = own, copies
        if rank > 1:
            first, others = copies[0], [*copies[1:rank], own, *copies[rank:]]
        if kernel is None:
            self._arithmetic.combine(first, others, [] if first is own else [own])
        else:
            kernel.join(first, others, first)
            kernel.deliver(own, first)


@functools.lru_cache(maxsize=64)
def _runs(lengths: tuple[int, ...], itemsize: int, ranks: int) -> list[tuple[int, int, int]]:
    """The chunks of pieces of these lengths, the same from step to step."""
    return cut(lengths, fitting(sum(lengths), CHUNK_BYTES // itemsize, SMALLEST_SHARE // itemsize, ranks))
