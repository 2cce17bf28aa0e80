"""Shared memory of simulated ranks: one piece of memory for all that map it, and words at which others may go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from support.simulation.machine.primitives import SimulatedSemaphore
from support.simulation.machine.scheduler import Scheduler
from support.simulation.machine.store_buffers import Order, StoreBuffers

from hvlike.system.mapped_memory import Segment, SegmentLocation, words
from hvlike.system.semaphore import SEMAPHORE_BYTES


class PlainSegment(Segment):
    """Memory of this process alone."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.address: int = self.array.ctypes.data
        self.semaphores: dict[int, SimulatedSemaphore] = {}

    def advise(self, advice: int, start: int, length: int) -> None:
        """Nothing is to be done."""


class PlainOffer:
    """hvlike.system.mapped_memory.SegmentOffer."""

    def __init__(self, segment: PlainSegment, number: int) -> None:
        self.segment = segment
        self.offer = SegmentLocation(f"segment {number}", segment.array.nbytes, b"")

    def withdraw(self) -> None:
        """Nothing is to be done."""


class Words:
    """A view of words of 8 bytes: each look and each change is a point."""

    __slots__ = ("_buffers", "_first", "_is_awaited", "_scheduler", "_step", "view")

    def __init__(
        self,
        scheduler: Scheduler,
        buffers: StoreBuffers,
        view: memoryview,
        first: int,
        step: int = 1,
        *,
        is_awaited: bool = True,
    ) -> None:
        """first: the address of the first one. step: from each to the next one. Both in words. is_awaited: whether a
        rank may wait for what is stored there.
        """
        self._scheduler, self._buffers, self.view = scheduler, buffers, view
        self._first, self._step, self._is_awaited = first, step, is_awaited

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            start, _, step = place.indices(len(self.view))
            first = self._first + start * self._step
            view, awaited = self.view[place], self._is_awaited
            return Words(self._scheduler, self._buffers, view, first, step * self._step, is_awaited=awaited)
        self._scheduler.switch("look")
        return self._buffers.look(self.view, place, self._first + place * self._step)

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(place, slice):
            self._scheduler.fence()
            self.view[place] = value.view if isinstance(value, Words) else value
            self._scheduler.change()
        else:
            at = self._first + place * self._step
            self._buffers.store(self.view, place, at, value, is_awaited=self._is_awaited)
        self._scheduler.switch("store")

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[int]:
        for place in range(len(self.view)):
            yield self[place]

    def tolist(self) -> list[int]:
        """All of them."""
        return list(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """The memory itself: who changes it so says by a word that it has."""
        self._scheduler.fence()
        return np.asarray(self.view, dtype)

    def tobytes(self) -> bytes:
        """All of them, as they lie in memory."""
        self._scheduler.switch("look")
        self._scheduler.fence()
        return self.view.tobytes()


class NodeMemory:
    """The segments of a job, by node."""

    def __init__(self, scheduler: Scheduler, node_of: dict[int, int], order: Order) -> None:
        self._scheduler, self._node_of = scheduler, node_of
        self._buffers = StoreBuffers(scheduler, order)
        self._segments: dict[str, tuple[int, PlainSegment]] = {}

    def private(self, nbytes: int) -> Segment:
        """Segment.private."""
        return PlainSegment(nbytes)

    def make_offer(self, nbytes: int, attempt: int) -> Any:
        """mapped_memory.make_offer."""
        made = PlainOffer(PlainSegment(nbytes), len(self._segments))
        self._segments[made.offer.path] = self._node_of[self._scheduler.rank], made.segment
        return made

    def accept(self, offer: SegmentLocation) -> Segment | None:
        """mapped_memory.accept."""
        node, segment = self._segments[offer.path]
        return segment if node == self._node_of[self._scheduler.rank] else None

    def words(self, segment: Any, offset: int, count: int) -> Any:
        """mapped_memory.words."""
        # Those behind a semaphore say who sleeps on it: they are looked at before it is posted, and never waited for.
        awaited = offset - SEMAPHORE_BYTES not in segment.semaphores
        first = (segment.address + offset) // 8
        return Words(self._scheduler, self._buffers, words(segment, offset, count), first, is_awaited=awaited)

    def semaphore(self, segment: Any, offset: int) -> Any:
        """The one that lies there."""
        made = SimulatedSemaphore(self._scheduler, is_fence=segment.array.nbytes == SEMAPHORE_BYTES)
        return segment.semaphores.setdefault(offset, made)
