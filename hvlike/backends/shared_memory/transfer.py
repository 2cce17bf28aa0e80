"""Bytes that move among the ranks of a node: gather and alltoall.

What is short goes through the slots of the region:

    sender      slot 0   slot 1   ...        puts a chunk once all receivers have taken the one before the last
    receivers   slot 0   slot 1   ...        take a chunk once it is there

A gather has one sender for all other ranks; an alltoall one stream for each pair of ranks. Each stream goes on by
itself, two chunks deep, whatever the others do. A sender puts its first chunks before it posts the work: who sees that
it has arrived finds them.

What is long is read where it lies, through the system, with one copy: its owner posts the addresses, arrives and
departs; a reader arrives, copies 4 MiB at a time and departs. Short tensors of one owner are read together.
No rank leaves before all have arrived at the same work.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hvlike.backends.shared_memory.cma import CmaMemory, layout
from hvlike.backends.shared_memory.region import ADDRESSES, PUBLISHED, REDUCED, Region, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS
from hvlike.backends.shared_memory.staging import PASSES
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array, bytes_of, raw_view
from hvlike.transport.memory.process_memory import ROW_BYTES, ProcessMemory, Ranges

PIECE_BYTES = 4 << 20  # Of one call of the system: in between other coroutines, and other owners, have a turn


class Source(NamedTuple):
    """What one rank has for this one."""

    owner: int
    first: int  # Among the addresses that the owner posts
    targets: Sequence[torch.Tensor]  # Contiguous bytes of this rank, as long as what lies at those addresses


class _Read(NamedTuple):
    memory: ProcessMemory
    theirs: Ranges
    mine: Ranges
    row: int
    ranges: int
    nbytes: int


class PeerReads:
    """The reads of one piece of work; made when all owners have arrived. See `Unstaged` (work_sync.py)."""

    def __init__(self, region: Region, memory: CmaMemory, sources: Sequence[Source]) -> None:
        self._left: deque[_Read] = deque()
        plans = [self._plan(region, memory, source) for source in sources]
        while any(plans):
            # From all owners in turn.
            self._left.extend(plan.popleft() for plan in plans if plan)

    def _plan(self, region: Region, memory: CmaMemory, source: Source) -> deque[_Read]:
        owner, first, targets = source
        chunks, index, starts, sizes = layout(tuple(map(len, targets)), 1, 1, PIECE_BYTES)
        theirs, mine = Ranges(sizes), Ranges(sizes)
        posted = np.asarray(region.counters[owner].addresses)[first : first + len(targets)]
        np.add(posted[index], starts, out=theirs.addresses)
        np.add(np.array([target.data_ptr() for target in targets], np.uint64)[index], starts, out=mine.addresses)
        return deque(
            _Read(memory.ranks[owner], theirs, mine, chunk.row, chunk.ranges, chunk.nbytes) for chunk in chunks
        )

    @property
    def unfinished(self) -> bool:
        return bool(self._left)

    def advance(self) -> bool:
        memory, theirs, mine, row, ranges, nbytes = self._left.popleft()
        place = ROW_BYTES * row
        memory.read(theirs.start + place, mine.start + place, ranges, nbytes)
        return True


GATHER_READ_BYTES = 1 << 20  # All tensors of a gather together: from here on they are read where they lie
ALLTOALL_READ_BYTES = 256 << 10  # What one rank has for another: the same

_GATHER, _ALLTOALL = 0x6761746865720000, 0x616C6C746F616C6C  # Stamps

Counter = tuple[memoryview, int]  # Some words of a rank, and which of them: how many chunks it has put or taken


class _Stream:
    """Chunks that go one way through two slots; a chunk holds parts of one tensor or more."""

    def __init__(
        self,
        region: Region,
        stager: int,
        owner: int,
        mine: Counter,
        others: Sequence[tuple[Counter, int]],
        tensors: Iterable[torch.Tensor],
    ) -> None:
        """mine: counts the chunks moved here. others: what it waits for, and how far each may be behind the chunk."""
        self.chunks: deque[list[Array]] = deque()
        self.owner = owner
        self._slots = region.byte_slots(stager, owner)
        self._order = region.order
        self._mine = mine
        self._others = others
        self.puts = stager == region.rank

        room = 0
        for tensor in tensors:
            data = bytes_of(tensor) if tensor.dtype is torch.uint8 else raw_view(tensor)
            start, length = 0, len(data)
            while start < length:
                if not room:
                    self.chunks.append([])
                    room = len(self._slots[0])
                part = data[start : start + room]
                self.chunks[-1].append(part)
                start += len(part)
                room -= len(part)

    def step(self) -> bool:
        words, index = self._mine
        turn = words[index]
        for (others, place), behind in self._others:
            if others[place] < turn - behind:
                return False
        self._order()
        slot, first = self._slots[turn % SLOTS], 0
        for part in self.chunks.popleft():
            room = slot[first : first + len(part)]
            if self.puts:
                room[...] = part
            else:
                part[...] = room
            first += len(part)
        self._order()
        words[index] = turn + 1
        return True


def gather(sync: WorkSync, parts: Iterable[tuple[torch.Tensor, int]]) -> Coroutine[None]:
    """Bring each tensor of bytes from its owner to the others, through the slots, as a part of some other work."""
    yield from _move(sync, _gather_streams(sync.region, parts))


def gather_at_once(
    sync: WorkSync, memory: CmaMemory, tensors: Sequence[torch.Tensor], owners: Sequence[int]
) -> Coroutine[None]:
    """The same as a piece of work of its own."""
    if not any(map(len, tensors)):
        return
    region, lengths = sync.region, [len(tensor) for tensor in tensors]
    parts = list(zip(tensors, owners, strict=True))
    stamp = hash((_GATHER, *lengths, *owners))
    if not memory.ranks or len(tensors) > ADDRESSES or not is_read(lengths, owners):
        yield from sync.for_all(_exchange(sync, stamp, _gather_streams(region, parts)))
        return
    of_rank: list[list[torch.Tensor]] = [[] for _ in region.counters]
    for tensor, owner in parts:
        of_rank[owner].append(tensor)
    mine = of_rank[region.rank]
    for index, tensor in enumerate(mine):
        region.mine.addresses[index] = tensor.data_ptr()
    sources = [Source(peer, 0, of_rank[peer]) for peer in _after(region, 1) if of_rank[peer]]
    reads = _Reads(memory, sources, mine, region.peers if mine else [])
    yield from reads.keep(sync, _exchange(sync, stamp, [], reads))


def alltoall(
    sync: WorkSync, memory: CmaMemory, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> Coroutine[None]:
    """Bring `sends[i]` to rank i of the node, which has as much room for it; the own part is copied. Bytes."""
    region = sync.region
    rank, mine, counters = region.rank, region.mine, region.counters
    least = ALLTOALL_READ_BYTES if memory.ranks else sys.maxsize
    lengths = mine.lengths[(sync.number + 1) % 2]
    streams, reads = [], _Reads(memory, [], [], [])
    for peer in _after(region, 1):
        lengths[peer] = nbytes = len(sends[peer])
        if nbytes >= least:
            mine.addresses[peer] = sends[peer].data_ptr()
            reads.exposed.append(sends[peer])
            reads.readers.append(peer)
        elif nbytes:
            waits = [((counters[peer].received, rank), SLOTS - 1)]
            streams.append(_Stream(region, rank, peer, (mine.passed, peer), waits, [sends[peer]]))
    targets = [stream.owner for stream in streams]
    for peer in _after(region, -1):
        lengths[region.ranks + peer] = nbytes = len(receives[peer])
        if nbytes >= least:
            reads.sources.append(Source(peer, rank, [receives[peer]]))
        elif nbytes:
            waits = [((counters[peer].passed, rank), -1)]
            streams.append(_Stream(region, peer, rank, (mine.received, peer), waits, [receives[peer]]))

    def compare() -> None:
        parity = sync.number % 2
        for peer in region.peers:
            sent, expected = (counters[peer].lengths[parity][first + rank] for first in (0, region.ranks))
            if (sent, expected) != (len(receives[peer]), len(sends[peer])):
                sync.set_apart(
                    [peer],
                    f"it sends {sent} bytes, {len(receives[peer])} are expected from it; it expects {expected} bytes, "
                    f"{len(sends[peer])} are sent to it",
                )

    reduced = region.turns[:]
    while not _are_free(region, targets, reduced):
        sync.check_peers()
        yield Wait.NOTIFY
    exchange = _exchange(sync, _ALLTOALL, streams, reads, lambda: receives[rank].copy_(sends[rank]), compare)
    yield from reads.keep(sync, exchange)


def is_read(lengths: Sequence[int], owners: Sequence[int]) -> bool:
    """Whether the tensors of a gather are read where they lie. Where one rank owns nearly all of them (a broadcast) it
    had nothing to do meanwhile: there two ranks that stage side by side took 0.7 of the time.
    """
    total = sum(lengths)
    if total < GATHER_READ_BYTES:
        return False
    owned: dict[int, int] = {}
    for length, owner in zip(lengths, owners, strict=True):
        owned[owner] = owned.get(owner, 0) + length
    return 4 * max(owned.values()) <= 3 * total


class _Reads(NamedTuple):
    """What ranks read from each other's tensors."""

    memory: CmaMemory
    sources: list[Source]
    exposed: list[torch.Tensor]  # Of this rank
    readers: list[int]  # Of those

    def keep(self, sync: WorkSync, work: Coroutine[None]) -> Coroutine[None]:
        """Run the next work; if this rank gives it up, what the peers read stays."""
        with sync.exposed(self.exposed, sync.number + 1):
            yield from sync.for_all(work)


def _exchange(
    sync: WorkSync,
    stamp: int,
    streams: list[_Stream],
    reads: _Reads | None = None,
    copy_own: Callable[[], object] | None = None,
    compare: Callable[[], None] | None = None,
) -> Coroutine[None]:
    """Move all chunks of the next work. copy_own: done while the peers have something to do already; compare: raises
    where the peers do not expect what comes; all have arrived.
    """
    for stream in streams:
        while stream.puts and stream.chunks and stream.step():
            pass
    number = sync.begin(stamp, 0)
    sync.region.notify_if_sleeping()
    if copy_own is not None:
        copy_own()
    yield from sync.arrive(number)
    if compare is not None:
        compare()
    yield from _move(sync, streams)
    if reads is not None and (reads.sources or reads.readers):
        yield from sync.finish(PeerReads(sync.region, reads.memory, reads.sources), number)
        yield from sync.depart(number, reads.readers)


def _after(region: Region, way: int) -> list[int]:
    """The other ranks, from the next one on, up or down: so that not all read from the same one."""
    return [(region.rank + way * step) % region.ranks for step in range(1, region.ranks)]


def _gather_streams(region: Region, parts: Iterable[tuple[torch.Tensor, int]]) -> list[_Stream]:
    rank, counters = region.rank, region.counters
    of_owner: dict[int, list[torch.Tensor]] = {}
    for tensor, owner in parts:
        of_owner.setdefault(owner, []).append(tensor)
    streams = []
    for owner, tensors in of_owner.items():
        if owner == rank:
            waits = [((counters[peer].fetched, rank), SLOTS - 1) for peer in region.peers]
            streams.append(_Stream(region, rank, rank, (region.mine.words, PUBLISHED), waits, tensors))
        else:
            waits = [((counters[owner].words, PUBLISHED), -1)]
            streams.append(_Stream(region, owner, owner, (region.mine.fetched, owner), waits, tensors))
    return streams


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


def _move(sync: WorkSync, streams: Sequence[_Stream]) -> Coroutine[None]:
    """Move all chunks; wakes the peers after each step."""
    region, looks, passes = sync.region, 0, 0
    checks = region.spin.counter_checks
    left = [stream for stream in streams if stream.chunks]
    while left:
        moved = False
        for stream in left:
            moved |= stream.step()
        looks += 1
        if moved:
            left = [stream for stream in left if stream.chunks]
            region.notify_if_sleeping()
            looks, passes = 0, passes + 1
            if passes % PASSES == 0:
                yield Wait.AGAIN
        elif looks % checks == 0:
            sync.check_peers()
            yield Wait.NOTIFY
