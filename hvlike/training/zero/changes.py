"""Who may look at a state that changes: copies are short, changes may be long, and each excludes the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """Keeps changes, by the program or in the loop, and copies, there too, apart."""

    def __init__(self) -> None:
        self.under_way = False
        """The state is being changed, by whichever thread."""
        self._lock = threading.Lock()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around a change; waits for a copy."""
        with self._lock:
            self.under_way = True
            try:
                yield
            finally:
                self.under_way = False

    @contextmanager
    def copy(self, *, wait: bool) -> Iterator[bool]:
        """Around a copy; yields whether it may be made. wait: for another copy, never for a change that is seen."""
        if self.under_way or not self._lock.acquire(blocking=wait):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()
