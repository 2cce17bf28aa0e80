"""Driving messages: pipelines advanced side by side, an estimate of the bandwidth, and a pool of message buffers.

On a slow network a rank keeps one message in flight, else as many as there is memory for. More than one only fills the
queues of a slow network: 25 MiB over 1 Gbit/s took 302 ms with all in flight at once, 220 with one at a time, and
210 is
the least possible. A fast network would be idle between two messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array, Kind


class MessageFlow(Protocol):
    """Messages that start and end in order."""

    @property
    def unfinished(self) -> bool:
        """True while messages are left."""

    def step(self) -> bool:
        """Start and end what can be now; True if anything moved."""

    @property
    def requests(self) -> Iterable[Any]:
        """The MPI requests in flight."""


def drive(rows: Sequence[MessageFlow]) -> Coroutine[None]:
    """Advance all pipelines until none is left; yields while nothing can move."""
    left = [row for row in rows if row.unfinished]
    while left:
        moved = False
        for row in left:
            moved |= row.step()
        left = [row for row in left if row.unfinished]
        if left:
            yield Wait.AGAIN if moved else Wait.POLL


def requests_of(rows: Sequence[MessageFlow]) -> list[Any]:
    """The MPI requests in flight; each keeps its memory alive."""
    return [request for row in rows for request in row.requests]


SLOW_BYTES_PER_SECOND = 300e6
SMALLEST_SAMPLE = 4 << 20
"""Bytes from which a rate is believed."""


class BandwidthEstimator:
    """The rate at which messages have arrived at this rank in the last exchange that was large enough."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, from any point of time on."""
        self.slow = False
        self._clock = clock
        self._first: float | None = None
        self._last = 0.0
        self._bytes = 0

    def begin(self) -> None:
        """An exchange begins."""
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
        """The exchange has ended."""
        if self._first is not None and self._bytes >= SMALLEST_SAMPLE:
            self.slow = self._bytes < SLOW_BYTES_PER_SECOND * (self._last - self._first)


class BufferPool:
    """Buffers of one size that are taken and given back, and one accumulator."""

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._size = 0
        self._wide: tuple[Kind, Piece] | None = None

    def require(self, size: int) -> None:
        """Have all buffers hold at least `size` bytes. Only while none is taken."""
        if size > self._size:
            self._free.clear()
            self._size = size

    def take(self) -> Array:
        """Return a free buffer of bytes."""
        return self._free.pop() if self._free else np.empty(self._size, np.uint8)

    def give(self, buffer: Array) -> None:
        """Give a buffer back."""
        self._free.append(buffer)

    def accumulator(self, arithmetic: Arithmetic, length: int) -> Piece | None:
        """Return memory for the arithmetic of one message, None where it works in place."""
        key = arithmetic.element.kind
        if self._wide is None or self._wide[0] is not key or len(self._wide[1]) < length:
            memory = arithmetic.accumulator(length)
            if memory is None:
                return None
            self._wide = (key, memory)
        return self._wide[1]
