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
from hvlike.transport.memory.dtypes import Array, raw_view

Counter = tuple[memoryview, int]
"""Some words of a rank, and which of them: how many chunks it has put or taken."""


class _Stream:
    """Chunks that go one way through two slots."""

    def __init__(
        self, region: Region, stager: int, owner: int, mine: Counter, others: Sequence[tuple[Counter, int]]
    ) -> None:
        """mine: counts the chunks that this rank has moved. others: the counters that it waits for, and how far each
        may be behind the chunk to be moved.
        """
        self.chunks: deque[Array] = deque()
        self._slots = region.byte_slots(stager, owner)
        self._order = region.order
        self._mine = mine
        self._others = others
        self._puts = stager == region.rank

    def add(self, data: Array) -> None:
        """Move these bytes after what was added before."""
        size = len(self._slots[0])
        self.chunks.extend(data[start : start + size] for start in range(0, len(data), size))

    def step(self) -> bool:
        """Move one chunk, if that is possible now."""
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


class SlotTransfer:
    """Streams that go on until all their chunks have moved."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.streams: list[_Stream] = []

    def may_begin(self) -> bool:
        """Whether the slots are free of what came before."""
        return True

    def copy_own(self) -> None:
        """What this rank does by itself, while its peers have something to do already."""

    def run(self, check: Callable[[], None]) -> Coroutine[None]:
        """Move everything; wakes the peers after each step. check: raises when a peer has given the region up."""
        region, left = self._region, self.streams
        passes, pending = 0, True
        while not self.may_begin():
            check()
            yield Wait.NOTIFY
        while left or pending:
            left = [stream for stream in left if stream.chunks]
            moved = False
            for stream in left:
                moved |= stream.step()
            if pending:
                self.copy_own()
                pending, moved = False, True
            if moved:
                region.notify_if_sleeping()
                passes += 1
                if passes % PASSES == 0:
                    yield Wait.AGAIN
            elif left:
                check()
                yield Wait.NOTIFY


class SlotGather(SlotTransfer):
    """Each tensor goes from its owner to all other ranks of the node."""

    def __init__(self, region: Region, parts: Iterable[tuple[torch.Tensor, int]]) -> None:
        """parts: tensors of bytes and the local ranks of their owners."""
        super().__init__(region)
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
            streams[owner].add(raw_view(tensor))
        self.streams = list(streams.values())


class SlotAlltoall(SlotTransfer):
    """`sends[i]` goes to rank i of the node, which has as much room for it; the own part is copied."""

    def __init__(
        self,
        region: Region,
        reduced: Sequence[int],
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
    ) -> None:
        """sends, receives: bytes, a tensor per rank; reduced: chunks each rank has been given to reduce so far."""
        super().__init__(region)
        rank, mine = region.rank, region.mine
        self._reduced = list(reduced)
        self._own = (receives[rank], sends[rank])
        self._targets = [peer for peer in region.peers if len(sends[peer])]
        for peer in self._targets:
            waits = [((region.counters[peer].received, rank), SLOTS - 1)]
            stream = _Stream(region, rank, peer, (mine.passed, peer), waits)
            stream.add(raw_view(sends[peer]))
            self.streams.append(stream)
        for peer in region.peers:
            if len(receives[peer]):
                stream = _Stream(
                    region, peer, rank, (mine.received, peer), [((region.counters[peer].passed, rank), -1)]
                )
                stream.add(raw_view(receives[peer]))
                self.streams.append(stream)

    def may_begin(self) -> bool:
        """Nobody looks any more at what was staged for reductions of those to which this rank sends: the same slots."""
        region = self._region
        for peer in self._targets:
            needed = self._reduced[peer]
            if region.counters[peer].words[REDUCED] < needed:
                return False
            if region.rank == first_peer(peer) and any(
                each.taken[peer] < needed for rank, each in enumerate(region.counters) if rank != peer
            ):
                return False
        return True

    def copy_own(self) -> None:
        """Copy what this rank sends to itself."""
        target, source = self._own
        target.copy_(source)
