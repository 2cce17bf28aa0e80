"""What a rank has done since init(), as figures that only grow; and means of figures over ranks. Always on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Moved:
    """What was carried out of one kind since init()."""

    operations: int = 0
    """Operations that were asked for; of gradients: buckets' tensors."""
    batches: int = 0
    """Runs that carried them out: what is fused runs as one."""
    bytes: int = 0
    """Of this rank's tensors."""
    largest_batch: int = 0
    """Operations of the largest batch."""
    largest_batch_bytes: int = 0

    @property
    def operations_per_batch(self) -> float:
        """How much is fused on average; 0 where nothing has run."""
        return self.operations / self.batches if self.batches else 0.0

    @property
    def bytes_per_batch(self) -> float:
        """Average size of a batch; 0 where nothing has run."""
        return self.bytes / self.batches if self.batches else 0.0

    def __str__(self) -> str:
        return (
            f"{self.operations} operations in {self.batches} batches (largest: {self.largest_batch} operations, "
            f"{self.largest_batch_bytes} bytes), {self.bytes} bytes in all"
        )


@dataclass(frozen=True)
class Waits:
    """What one optimizer, wrapped model or the like has waited for communication that nothing hid, since init()."""

    waits: int = 0
    """How often: once in each step; ZeRO's and some others wait for several things in a step."""
    seconds: float = 0.0
    last_seconds: float = 0.0
    longest_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s in {self.waits} (longest {self.longest_seconds:.3f} s)"


class Counters:
    """The figures of one rank; any thread. Kept as lists: in every step they are counted, and seldom looked at."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        """When counting began."""
        self._lock = threading.Lock()
        self._moved: dict[str, list[int]] = {}
        self._waits: dict[str, list[float]] = {}

    def ran(self, kind: str, operations: int, nbytes: int) -> None:
        """A batch of operations of one kind starts."""
        with self._lock:
            figures = self._moved.get(kind)
            if figures is None:
                figures = self._moved[kind] = [0] * 5
            figures[0] += operations
            figures[1] += 1
            figures[2] += nbytes
            figures[3] = max(figures[3], operations)
            figures[4] = max(figures[4], nbytes)

    def waited(self, name: str, seconds: float) -> None:
        """The caller of a planned reduction has waited for its end."""
        with self._lock:
            figures = self._waits.get(name)
            if figures is None:
                figures = self._waits[name] = [0, 0.0, 0.0, 0.0]
            figures[0] += 1
            figures[1] += seconds
            figures[2] = seconds
            figures[3] = max(figures[3], seconds)

    def moved(self) -> dict[str, Moved]:
        """What has run, by kind."""
        with self._lock:
            return {kind: Moved(*figures) for kind, figures in self._moved.items()}

    def waits(self) -> dict[str, Waits]:
        """ExposedWait waits, by the name of what has waited."""
        with self._lock:
            return {name: Waits(int(waits), *seconds) for name, (waits, *seconds) in self._waits.items()}


Sums = Mapping[str, tuple[float, int]]
"""For each quantity the sum of some values, and how many they are."""


class Means:
    """Means of named quantities."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, sums: Sums) -> None:
        """More values have come."""
        for name, (total, count) in sums.items():
            before, counted = self._sums.get(name, (0.0, 0))
            self._sums[name] = (before + total, counted + count)

    def means(self) -> dict[str, float]:
        """The mean of each quantity over all values that have come, in the order of their first appearance."""
        return {name: total / count for name, (total, count) in self._sums.items()}

    def take(self) -> dict[str, tuple[float, int]]:
        """What has come since the last time, which is forgotten here."""
        sums, self._sums = self._sums, {}
        return sums
