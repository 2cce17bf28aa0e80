"""Driving messages: pipelines advanced side by side, an estimate of the bandwidth, and a pool of message buffers.

On a slow network a rank keeps one message in flight, else as many as there is memory for. More than one only fills the
queues of a slow network: 25 MiB over 1 Gbit/s took 302 ms with all in flight at once, 220 with one at a time, and 210
is the least possible. A fast network would be idle between two messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array

LOOKS = 8


def has_ended(request: Any) -> bool:
    """Whether a message that moves has ended, after a few looks: MPI reads what has come at each of them, and a turn of
    the loop between two costs more than they do. 1 MiB took a tenth longer with one look a turn.
    """
    for _ in range(LOOKS):
        if request.Test():
            break
    else:
        return False
    return True


class MessagePipeline:
    """Messages (number, peer) of one direction and purpose, started and ended in order, some at a time."""

    def __init__(
        self,
        order: Sequence[tuple[int, int]],
        window: int,
        start: Callable[[int, int], Any],
        end: Callable[[int, int], None] = lambda number, peer: None,
        ready: Callable[[int, int], bool] = lambda number, peer: True,
    ) -> None:
        """order: all messages; window: at most so many are in flight. start: begins a message and returns its request;
        end: what follows it; ready: whether it may be started.
        """
        self.requests: deque[Any] = deque()  # Of MPI, in flight; each keeps its memory alive
        self._order = order
        self._started: deque[tuple[int, int]] = deque()
        self._waiting: deque[tuple[int, int]] = deque()
        self._window = window
        self._start, self._end, self._ready = start, end, ready

    def begin(self) -> None:
        """Have all messages to start again."""
        self._waiting.extend(self._order)

    @property
    def unfinished(self) -> bool:
        return bool(self.requests or self._waiting)

    def step(self) -> bool:
        """End and start what can be; returns whether anything moved."""
        moved = False
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
            self._end(*self._started.popleft())
            moved = True
        while self._waiting and len(self.requests) < self._window and self._ready(*self._waiting[0]):
            each = self._waiting.popleft()
            self.requests.append(self._start(*each))
            self._started.append(each)
            moved = True
        return moved


def drive(pipelines: Sequence[MessagePipeline]) -> Coroutine[None]:
    """Advance all pipelines until none is left; yields while nothing can move."""
    left = [each for each in pipelines if each.unfinished]
    while left:
        moved = False
        for each in left:
            moved |= each.step()
        left = [each for each in left if each.unfinished]
        if left:
            yield Wait.AGAIN if moved else Wait.POLL


SLOW_BYTES_PER_SECOND = 150e6
SMALLEST_SAMPLE = 1 << 20


class BandwidthEstimator:
    """The rate at which messages have arrived at this rank in the last exchange that was large enough."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.slow = False
        self._clock = clock or system.perf_counter
        self._first: float | None = None
        self._last = 0.0
        self._bytes = 0

    def begin(self) -> None:
        self._first = None
        self._bytes = 0

    def arrived(self, nbytes: int) -> None:
        """A message has arrived. The first one starts the clock: a late peer is no slow network."""
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        else:
            self._bytes += nbytes

    def end(self) -> None:
        if self._first is not None and self._bytes >= SMALLEST_SAMPLE:
            self.slow = self._bytes < SLOW_BYTES_PER_SECOND * (self._last - self._first)


class SharedScratch:
    """Memory of the reductions of one network, which run one at a time: the n-th buffer of each is the same."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []

    def take(self, number: int, nbytes: int) -> Array:
        """Buffer `number` for a reduction that is prepared. Earlier ones keep a smaller one that they have."""
        if number == len(self._buffers):
            self._buffers.append(np.empty(nbytes, np.uint8))
        elif len(self._buffers[number]) < nbytes:
            self._buffers[number] = np.empty(nbytes, np.uint8)
        return self._buffers[number][:nbytes]


class BufferPool:
    """Buffers of one size that are taken and given back."""

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._size = 0

    def require(self, size: int) -> None:
        """Have all buffers hold at least `size` bytes. Only while none is taken."""
        if size > self._size:
            self._free.clear()
            self._size = size

    def take(self) -> Array:
        return self._free.pop() if self._free else np.empty(self._size, np.uint8)

    def give(self, buffer: Array | None) -> None:
        if buffer is not None:
            self._free.append(buffer)
