"""What a rank has done since init(), as figures that only grow; and means of figures over ranks. Always on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class StepCounts:
    """The figures of the compiled steps of one plan, added up by the one thread that runs them."""

    __slots__ = ("buckets", "kind", "last_seconds", "longest_seconds", "seconds", "steps")

    def __init__(self, kind: str, buckets: Sequence[tuple[int, int]]) -> None:
        """buckets: the number of tensors and the bytes of each batch of a step."""
        self.kind = kind
        self.buckets = buckets
        self.steps = 0
        # How long the caller has waited for communication.
        self.seconds = self.last_seconds = self.longest_seconds = 0.0


class Counters:
    """The figures of one rank. From any thread. Kept in lists, because they are counted often and read seldom."""

    def __init__(self) -> None:
        self.since = system.monotonic()
        self._lock = system.Lock()
        self._moved: dict[str, list[int]] = {}
        self._waits: dict[str, list[float]] = {}
        self._steps: dict[str, StepCounts] = {}

    def of_steps(self, name: str, kind: str, buckets: Sequence[tuple[int, int]]) -> StepCounts:
        """Where the compiled steps of `name` are counted from now on; what it has counted before stays counted."""
        with self._lock:
            before = self._steps.get(name)
            if before is not None:
                self._fold(name, before)
            counts = self._steps[name] = StepCounts(kind, buckets)
        return counts

    def ran(self, kind: str, operations: int, nbytes: int) -> None:
        with self._lock:
            self._add_batch(kind, operations, nbytes, 1)

    def waited(self, name: str, seconds: float) -> None:
        """Count a wait for the end of a planned reduction."""
        with self._lock:
            if name in self._steps:
                self._fold(name, self._steps[name])
            self._add_waits(name, 1, seconds, seconds, seconds)

    def _add_batch(self, kind: str, operations: int, nbytes: int, times: int) -> None:
        figures = self._moved.setdefault(kind, [0] * 5)
        figures[0] += operations * times
        figures[1] += times
        figures[2] += nbytes * times
        figures[3] = max(figures[3], operations)
        figures[4] = max(figures[4], nbytes)

    def _add_waits(self, name: str, waits: int, seconds: float, last: float, longest: float) -> None:
        figures = self._waits.setdefault(name, [0, 0.0, 0.0, 0.0])
        figures[0] += waits
        figures[1] += seconds
        figures[2] = last
        figures[3] = max(figures[3], longest)

    def _fold(self, name: str, counts: StepCounts) -> None:
        """Add what compiled steps have counted to the rest; with the lock held."""
        steps, counts.steps = counts.steps, 0
        seconds, counts.seconds = counts.seconds, 0.0
        longest, counts.longest_seconds = counts.longest_seconds, 0.0
        if steps:
            self._add_waits(name, steps, seconds, counts.last_seconds, longest)
            for operations, nbytes in counts.buckets:
                self._add_batch(counts.kind, operations, nbytes, steps)

    def _fold_all(self) -> None:
        for name, counts in self._steps.items():
            self._fold(name, counts)

    def moved(self) -> dict[str, Moved]:
        with self._lock:
            self._fold_all()
            return {kind: Moved(*figures) for kind, figures in self._moved.items()}

    def waits(self) -> dict[str, Waits]:
        with self._lock:
            self._fold_all()
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
