"""Reductions in which the first rank of a node, its leader, does what is to be done for all of them.

    leader         arrive   read the tensors of all, add them up   cross to other nodes   write them   depart
    other ranks    arrive                                                                              depart

The others sleep meanwhile: they leave their cores to the leaders, and are woken once. Where the system does not let the
ranks reach each other's memory, the tensors go to the leader through the staging slots, and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.shared_memory.cma import PASSES, CmaChunk, CmaMemory, CmaTables, layout
from hvlike.backends.shared_memory.region import TOTAL
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.transfer import gather
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Array, runs_at
from hvlike.transport.memory.process_memory import ROW_BYTES

Cross = Callable[[int], Coroutine[int]]
"""Goes on with the flat buffer of a leader: from how many ranks of its node are active to how many of all are."""


class FlatBuffer:
    """Room for tensors of these lengths one after another, in an order that is the same on every rank."""

    def __init__(self, lengths: Sequence[int], arithmetic: Arithmetic, memory: torch.Tensor) -> None:
        """memory: of bytes, enough; shared by all that do not run at the same time."""
        self.chunks, self._index, self._starts, self._sizes = layout(tuple(lengths), arithmetic.itemsize, 1)
        self.bytes = memory[: sum(self._sizes)]
        self.array: Array = self.bytes.numpy()
        self.piece = arithmetic.over(self.array)
        self.address = self.bytes.data_ptr()

    def pack(self, addresses: Sequence[int]) -> None:
        np.concatenate(self._places(addresses), out=self.array)

    def unpack(self, addresses: Sequence[int]) -> None:
        first = 0
        for place in self._places(addresses):
            place[:] = self.array[first : first + len(place)]
            first += len(place)

    def _places(self, addresses: Sequence[int]) -> list[Array]:
        runs = zip(self._index.tolist(), self._starts.tolist(), self._sizes, strict=True)
        return runs_at(addresses, runs)


class NodeReduction(Protocol):
    """The ranks of one node."""

    def run(self, addresses: list[int], active: int, tensors: Sequence[torch.Tensor], cross: Cross) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses; returns how many ranks are active, on all nodes."""


class SingleRank:
    """The only rank of its node."""

    def __init__(self, flat: FlatBuffer, arithmetic: Arithmetic) -> None:
        self._flat = flat
        self._arithmetic = arithmetic

    def run(self, addresses: list[int], active: int, tensors: Sequence[torch.Tensor], cross: Cross) -> Coroutine[int]:
        self._flat.pack(addresses)
        # On other nodes the contributions are prescaled when they are reduced.
        self._arithmetic.combine(self._flat.piece, [], partial=True)
        total = yield from cross(active)
        self._flat.unpack(addresses)
        return total


class LeaderByStaging:
    """Through the staging slots."""

    def __init__(self, sync: WorkSync, flat: FlatBuffer, staged: StagedReduction, stamp: int) -> None:
        """staged: leaves partial results with the first rank."""
        self._sync = sync
        self._flat = flat
        self._staged = staged
        self._stamp = stamp

    def run(self, addresses: list[int], active: int, tensors: Sequence[torch.Tensor], cross: Cross) -> Coroutine[int]:
        sync, region = self._sync, self._sync.region
        number = sync.begin(self._stamp, 0, active=active)
        yield from region.quiet.drive(self._staged.run(addresses))
        if not region.rank:
            self._flat.pack(addresses)
            region.mine.words[TOTAL] = yield from sync.for_all(cross(sync.count_active(number)))
        yield from gather(sync, [(self._flat.bytes, 0)])
        self._flat.unpack(addresses)
        return region.counters[0].words[TOTAL]


class _Chunks:
    """Has something done with each chunk, a few at a time. See `Unstaged`."""

    def __init__(self, chunks: Sequence[CmaChunk], do: Callable[[CmaChunk], None]) -> None:
        self._left = deque(chunks)
        self._do = do

    @property
    def unfinished(self) -> bool:
        return bool(self._left)

    def advance(self) -> bool:
        for _ in range(min(PASSES, len(self._left))):
            self._do(self._left.popleft())
        return True


class LeaderByCma:
    """In the memory of the ranks."""

    def __init__(
        self, sync: WorkSync, memory: CmaMemory, flat: FlatBuffer, arithmetic: Arithmetic, lengths: Sequence[int]
    ) -> None:
        self._sync = sync
        self._flat = flat
        self._stamp = arithmetic.stamp([*lengths, 0])
        self._tables = CmaTables(sync.region, memory, arithmetic, len(lengths), layout(lengths, arithmetic.itemsize, 1))
        self._join = arithmetic.steps(partial=True).join
        first, self._firsts = 0, {}
        for chunk in flat.chunks:
            self._firsts[chunk.row] = first
            first += chunk.elements
        self._itemsize = arithmetic.itemsize

    def run(self, addresses: list[int], active: int, tensors: Sequence[torch.Tensor], cross: Cross) -> Coroutine[int]:
        return self._sync.region.quiet.drive(self._run(addresses, active, tensors, cross))

    def _run(self, addresses: list[int], active: int, tensors: Sequence[torch.Tensor], cross: Cross) -> Coroutine[int]:
        sync, region = self._sync, self._sync.region
        self._tables.post(addresses)
        number = sync.begin(self._stamp, 0, active=active)
        with sync.exposed(tensors, number):
            yield from sync.arrive(number)
            if not region.rank:
                region.mine.words[TOTAL] = yield from sync.for_all(self._lead(number, cross))
            yield from sync.depart(number)
        return region.counters[0].words[TOTAL]

    def _lead(self, number: int, cross: Cross) -> Coroutine[int]:
        self._tables.locate()
        yield from self._sync.finish(_Chunks(self._flat.chunks, self._add_up), number)
        total = yield from cross(self._sync.count_active(number))
        yield from self._sync.finish(_Chunks(self._flat.chunks, self._hand_out), number)
        return total

    def _add_up(self, chunk: CmaChunk) -> None:
        first, place = self._firsts[chunk.row], ROW_BYTES * chunk.row
        mine, *peers = self._tables.members
        mine.memory.gather(
            mine.ranges.start + place, chunk.ranges, self._flat.address + first * self._itemsize, chunk.nbytes
        )
        copies: list[Any] = []
        for member in peers:
            member.memory.gather(member.ranges.start + place, chunk.ranges, member.scratch, chunk.nbytes)
            copies.append(member.copy[: chunk.elements])
        self._join(0, self._flat.piece[first : first + chunk.elements], copies)

    def _hand_out(self, chunk: CmaChunk) -> None:
        source = self._flat.address + self._firsts[chunk.row] * self._itemsize
        for member in self._tables.members:
            member.memory.scatter(member.ranges.start + ROW_BYTES * chunk.row, chunk.ranges, source, chunk.nbytes)
