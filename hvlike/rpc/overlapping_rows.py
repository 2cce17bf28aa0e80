"""Rows of the timeline for things that overlap: each gets the first row that nothing else is in."""

from __future__ import annotations

import heapq
import threading
from typing import Any

from hvlike.observe.recorder import Recorder


class OverlappingRows:
    """Rows "<title> 1", "<title> 2" and so on of one worker's timeline."""

    def __init__(self, recorder: Recorder, title: str) -> None:
        self.recorder = recorder
        self._title = title
        self._lock = threading.Lock()
        self._generation = -1
        self._free: list[int] = []
        self._rows = 0

    def enter(self) -> Stay:
        """Take a row."""
        with self._lock:
            if self._generation != self.recorder.generation:
                self._generation, self._free, self._rows = self.recorder.generation, [], 0
            if self._free:
                number = heapq.heappop(self._free)
            else:
                self._rows += 1
                number = self._rows
            return Stay(self, self.recorder, self.recorder.row(f"{self._title} {number}"), number, self._generation)

    def leave(self, number: int, generation: int) -> None:
        """Give a row back."""
        with self._lock:
            if generation == self._generation:
                heapq.heappush(self._free, number)


class Stay:
    """Something that has a row for a while. Silent when another timeline is recorded than the one it began in."""

    def __init__(self, rows: OverlappingRows, recorder: Recorder, row: int, number: int, generation: int) -> None:
        self._rows = rows
        self.recorder = recorder
        self._row = row
        self._number = number
        self._generation = generation

    def begin(self, name: str, arguments: dict[str, Any], at: int | None = None) -> None:
        """A phase begins."""
        if self._counts:
            self.recorder.begin(self._row, name, arguments, at)

    def end(self, arguments: dict[str, Any] | None = None, at: int | None = None) -> None:
        """The phase that began last ends."""
        if self._counts:
            self.recorder.end(self._row, arguments, at)

    def leave(self) -> None:
        """The row is free for something else."""
        self._rows.leave(self._number, self._generation)

    @property
    def _counts(self) -> bool:
        return self.recorder.on and self.recorder.generation == self._generation
