"""Pinned host memory, used again and again: to pin memory takes milliseconds."""

from __future__ import annotations

import threading
from collections import deque

import torch

from hvlike.planes.cuda.runtime import DeviceRuntime, Event

SMALLEST = 64 << 10


class PinnedPool:
    """Buffers of a few sizes, powers of two; those that are given back serve the next that asks. Any thread."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._free: dict[int, deque[tuple[torch.Tensor, Event | None]]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes; the device does nothing with it any more."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, deque())
            # Given back in the order in which the device uses them, so the first is the first to be free.
            if free and (free[0][1] is None or self._runtime.has_passed(free[0][1])):
                return free.popleft()[0]
        return self._runtime.pinned(size)

    def give_back(self, buffer: torch.Tensor, after: Event | None) -> None:
        """Let others have a buffer that `take` gave, once the device has come by `after`."""
        with self._lock:
            self._free.setdefault(buffer.numel(), deque()).append((buffer, after))
