"""What a rank has done since init(), as figures that only grow; and means of figures over ranks. Always on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvlike.system.system import system


@dataclass(frozen=True)
class Moved:
    """What operations of one kind have moved since init()."""

    operations: int = 0  # The operations that were asked for; of gradients, the tensors of buckets
    batches: int = 0  # The batches that carried them out. Fused operations are one batch.
    bytes: int = 0  # The size of this rank's tensors
    largest_batch: int = 0  # The operations of the largest batch
    largest_batch_bytes: int = 0

    @property
    def operations_per_batch(self) -> float:
        """The average number of operations in a batch, 0 before the first."""
        return self.operations / self.batches if self.batches else 0.0

    @property
    def bytes_per_batch(self) -> float:
        """The average size of a batch, 0 before the first."""
        return self.bytes / self.batches if self.batches else 0.0

    def __str__(self) -> str:
        return (
            f"{self.operations} operations in {self.batches} batches (largest: {self.largest_batch} operations, "
            f"{self.largest_batch_bytes} bytes), {self.bytes} bytes in all"
        )


@dataclass(frozen=True)
class Waits:
    """Exposed waits for communication of one optimizer or wrapped model since init()."""

    waits: int = 0  # The number of waits: one for each step, or several, for example of ZeRO
    seconds: float = 0.0
    last_seconds: float = 0.0
    longest_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s in {self.waits} (longest {self.longest_seconds:.3f} s)"


class Counters:
    """The figures of one rank. From any thread. Kept in lists, because they are counted often and read seldom."""

    def __init__(self) -> None:
        self.since = system.monotonic()
        self._lock = system.Lock()
        self._moved: dict[str, list[int]] = {}
        self._waits: dict[str, list[float]] = {}

    def ran(self, kind: str, operations: int, nbytes: int) -> None:
        """Count a batch."""
        with self._lock:
            figures = self._moved.setdefault(kind, [0] * 5)
            figures[0] += operations
            figures[1] += 1
            figures[2] += nbytes
            figures[3] = max(figures[3], operations)
            figures[4] = max(figures[4], nbytes)

    def waited(self, name: str, seconds: float) -> None:
        """Count a wait for the end of a planned reduction."""
        with self._lock:
            figures = self._waits.setdefault(name, [0, 0.0, 0.0, 0.0])
            figures[0] += 1
            figures[1] += seconds
            figures[2] = seconds
            figures[3] = max(figures[3], seconds)

    def moved(self) -> dict[str, Moved]:
        with self._lock:
            return {kind: Moved(*figures) for kind, figures in self._moved.items()}

    def waits(self) -> dict[str, Waits]:
        with self._lock:
            return {name: Waits(int(waits), *seconds) for name, (waits, *seconds) in self._waits.items()}


Sums = Mapping[str, tuple[float, int]]  # For each quantity, the sum of some values and their number


class Means:
    """Means of named quantities."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, sums: Sums) -> None:
        for name, (total, count) in sums.items():
            before, counted = self._sums.get(name, (0.0, 0))
            self._sums[name] = (before + total, counted + count)

    def means(self) -> dict[str, float]:
        """Return the mean of each quantity over all values, in the order of their first appearance."""
        return {name: total / count for name, (total, count) in self._sums.items()}

    def take(self) -> dict[str, tuple[float, int]]:
        """Return and forget what was added since the last call."""
        sums, self._sums = self._sums, {}
        return sums
