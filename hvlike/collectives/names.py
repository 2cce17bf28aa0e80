"""Names for operations that the caller did not name: numbered by kind, in each process set by itself.

One counter for everything would drift apart between ranks as soon as one of them does something alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping


class AutomaticNames:
    """The numbers given out on this rank in one process set."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def next(self, kind: str) -> str:
        """A name for the next unnamed operation of this kind; the same on ranks that issue the same operations."""
        return automatic_name(self.draw(kind))

    def draw(self, kind: str) -> int:
        """The number of the next unnamed operation of this kind."""
        with self._lock:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        return number

    def counts(self) -> dict[str, int]:
        """How many names of each kind were given out."""
        with self._lock:
            return dict(self._counts)

    def align(self, counts: Mapping[str, int]) -> None:
        """Go on from `counts`, which all ranks have agreed on."""
        with self._lock:
            self._counts.update(counts)


def automatic_name(number: int) -> str:
    """The name of an unnamed operation."""
    return f"noname.{number}"
