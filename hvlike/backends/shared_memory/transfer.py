"""Bytes that move through the slots of a region: gather and alltoall.

    sender      slot 0   slot 1   ...        puts a chunk once all receivers have taken the one before the last
    receivers   slot 0   slot 1   ...        take a chunk once it is there

A gather has one sender for all other ranks; an alltoall one stream for each pair of ranks. Each stream goes on by
itself, two chunks deep, whatever the others do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from hvlike.backends.shared_memory.region import PUBLISHED, REDUCED, Region, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS
from hvlike.backends.shared_memory.staging import PASSES
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array, bytes_of, raw_view

Counter = tuple[memoryview, int]  # Some words of a rank, and which of them: how many chunks it has put or taken


class _Stream:
    """Chunks that go one way through two slots."""

    def __init__(
        self, region: Region, stager: int, owner: int, mine: Counter, others: Sequence[tuple[Counter, int]]
    ) -> None:
        """mine: counts the chunks moved here. others: what it waits for, and how far each may be behind the chunk."""
        self.chunks: deque[Array] = deque()
        self._slots = region.byte_slots(stager, owner)
        self._order = region.order
        self._mine = mine
        self._others = others
        self._puts = stager == region.rank

    def add(self, data: Array) -> None:
        size = len(self._slots[0])
        self.chunks.extend(data[start : start + size] for start in range(0, len(data), size))

    def step(self) -> bool:
        words, index = self._mine
        turn = words[index]
        for (others, place), behind in self._others:
            if others[place] < turn - behind:
                return False
        self._order()
        chunk = self.chunks.popleft()
        slot = self._slots[turn % SLOTS][: len(chunk)]
        if self._puts:
            slot[...] = chunk
        else:
            chunk[...] = slot
        self._order()
        words[index] = turn + 1
        return True


def gather(region: Region, parts: Iterable[tuple[torch.Tensor, int]], check: Callable[[], None]) -> Coroutine[None]:
    """Bring each tensor of bytes from its owner to the others; check: raises when a peer has given the region up."""
    rank, counters = region.rank, region.counters
    streams: dict[int, _Stream] = {}
    for tensor, owner in parts:
        if owner not in streams:
            if owner == rank:
                waits = [((counters[peer].fetched, rank), SLOTS - 1) for peer in region.peers]
                streams[owner] = _Stream(region, rank, rank, (region.mine.words, PUBLISHED), waits)
            else:
                waits = [((counters[owner].words, PUBLISHED), -1)]
                streams[owner] = _Stream(region, owner, owner, (region.mine.fetched, owner), waits)
        streams[owner].add(bytes_of(tensor) if tensor.dtype is torch.uint8 else raw_view(tensor))
    yield from _move(region, list(streams.values()), check)


def alltoall(
    region: Region, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], check: Callable[[], None]
) -> Coroutine[None]:
    """Bring `sends[i]` to rank i of the node, which has as much room for it; the own part is copied. Bytes."""
    rank, mine, counters = region.rank, region.mine, region.counters
    targets = [peer for peer in region.peers if len(sends[peer])]
    streams = []
    for peer in targets:
        waits = [((counters[peer].received, rank), SLOTS - 1)]
        streams.append(_Stream(region, rank, peer, (mine.passed, peer), waits))
        streams[-1].add(raw_view(sends[peer]))
    for peer in region.peers:
        if len(receives[peer]):
            streams.append(_Stream(region, peer, rank, (mine.received, peer), [((counters[peer].passed, rank), -1)]))
            streams[-1].add(raw_view(receives[peer]))
    reduced = region.turns[:]
    while not _are_free(region, targets, reduced):
        check()
        yield Wait.NOTIFY
    yield from _move(region, streams, check, lambda: receives[rank].copy_(sends[rank]))


def _are_free(region: Region, targets: Sequence[int], reduced: Sequence[int]) -> bool:
    """Whether nobody looks any more at what was staged for reductions of `targets`: the same slots."""
    for peer in targets:
        needed = reduced[peer]
        if region.counters[peer].words[REDUCED] < needed:
            return False
        if region.rank == first_peer(peer) and any(
            each.taken[peer] < needed for rank, each in enumerate(region.counters) if rank != peer
        ):
            return False
    return True


def _move(
    region: Region, left: list[_Stream], check: Callable[[], None], copy_own: Callable[[], object] | None = None
) -> Coroutine[None]:
    """Move all chunks; wakes the peers after each step. copy_own: done while the peers have something to do already."""
    passes = 0
    while left or copy_own:
        left = [stream for stream in left if stream.chunks]
        moved = False
        for stream in left:
            moved |= stream.step()
        if copy_own:
            copy_own()
            copy_own, moved = None, True
        if moved:
            region.notify_if_sleeping()
            passes += 1
            if passes % PASSES == 0:
                yield Wait.AGAIN
        elif left:
            check()
            yield Wait.NOTIFY
