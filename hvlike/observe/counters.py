"""What a rank has done so far, in figures that only grow; always on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace


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
    """The figures of one rank; any thread."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        """When counting began."""
        self._lock = threading.Lock()
        self._moved: dict[str, Moved] = {}
        self._waits: dict[str, Waits] = {}

    def ran(self, kind: str, operations: int, nbytes: int) -> None:
        """A batch of operations of one kind starts."""
        with self._lock:
            before = self._moved.get(kind, _NOTHING_MOVED)
            self._moved[kind] = Moved(
                before.operations + operations,
                before.batches + 1,
                before.bytes + nbytes,
                max(before.largest_batch, operations),
                max(before.largest_batch_bytes, nbytes),
            )

    def waited(self, name: str, seconds: float) -> None:
        """The caller of a planned reduction has waited for its end."""
        with self._lock:
            before = self._waits.get(name, _NO_WAITS)
            self._waits[name] = replace(
                before,
                waits=before.waits + 1,
                seconds=before.seconds + seconds,
                last_seconds=seconds,
                longest_seconds=max(before.longest_seconds, seconds),
            )

    def moved(self) -> dict[str, Moved]:
        """What has run, by kind."""
        with self._lock:
            return dict(self._moved)

    def waits(self) -> dict[str, Waits]:
        """Exposed waits, by the name of what has waited."""
        with self._lock:
            return dict(self._waits)


_NOTHING_MOVED = Moved()
_NO_WAITS = Waits()
