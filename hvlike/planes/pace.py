"""Whether the network is slow: then a rank has one message on its way at a time, else as many as there is memory for.

More than one only fills the queues of a slow network: 25 MiB over 1 Gbit/s took 302 ms with all on their way at once,
220 with one at a time, and 210 is the least possible. A fast network would be idle between two messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SLOW_BYTES_PER_SECOND = 300e6
SMALLEST_SAMPLE = 4 << 20
"""Bytes from which a rate is believed."""


class Pace:
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
        """A message has arrived. The first one starts the clock: a peer that was late says nothing of the network."""
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        else:
            self._bytes += nbytes

    def end(self) -> None:
        """The exchange has ended."""
        if self._first is not None and self._bytes >= SMALLEST_SAMPLE:
            self.slow = self._bytes < SLOW_BYTES_PER_SECOND * (self._last - self._first)
