"""The background threads of a rank: they listen on the doorbell in turn and run work items in between.

A listening thread sleeps on the doorbell and drives the loop while something runs there. When a work item arrives (a
peer's request, say), the thread that sees it leaves the loop and runs the item itself, so that no other thread has to
be woken for it. Before it does, it makes sure that another thread listens. Without work items there is one thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from hvlike.system.system import system

WorkItem = Callable[[], None]
Listen = Callable[[Callable[[], bool], bool], None]
"""Blocks until the first argument returns True; the second: whether a work item is likely to come at once."""

_HOT_SECONDS = 2e-3
"""A work item that comes this soon after the last one makes it likely that the next one will, too. Waking a thread may
take half a millisecond: with a shorter limit each item would find its thread asleep."""

_SPARE = 4  # Threads kept for unlimited work items, beyond those for limited ones


class ThreadPool:
    """Threads that run work items. Limited items run at most `limit` at a time; the others never wait."""

    def __init__(self, listen: Listen, summon: Callable[[], None]) -> None:
        """summon: wakes a listening thread; may be called anywhere."""
        self._listen = listen
        self._summon = summon
        self._lock = system.Lock()
        self._items: deque[WorkItem] = deque()
        self._limited: deque[WorkItem] = deque()
        self.limit = 0  # How many limited work items may run at a time; 0 while this rank serves no requests
        self._listening = 0
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._hot = False
        self._ended = 0.0
        self.running = 0

    def start(self) -> None:
        """Start the first thread, which listens at once: after all that it needs is there."""
        with self._lock:
            self._grow()

    def pin(self, core: int) -> None:
        """Run the first thread on one core from now on. Raises: OSError for a core that is not there."""
        os.sched_setaffinity(self._threads[0].native_id or 0, {core})

    @property
    def queued(self) -> int:
        return len(self._limited)

    @property
    def size(self) -> int:
        return len(self._threads)

    def allow(self, limit: int) -> None:
        """Run so many limited work items at a time from now on; threads that are not needed for that end soon."""
        self.limit = limit
        for _ in self._threads:
            self._summon()

    def submit(self, item: WorkItem, *, limited: bool = False) -> None:
        """Have a background thread run `item`. From any thread, the loop included."""
        if limited:
            self._limited.append(partial(self._run_limited, item))
        else:
            self._items.append(item)
        self._summon()

    def close(self) -> None:
        """Stop the listening threads and wait for them; a thread that runs a work item ends after it."""
        self._closing = True
        for thread in list(self._threads):
            while thread.is_alive() and self._listening and thread is not threading.current_thread():
                self._summon()
                thread.join(0.01)

    def _called(self) -> bool:
        return (
            bool(self._items)
            or (bool(self._limited) and self.running < self.limit)
            or self._closing
            or self._are_too_many()
        )

    def _are_too_many(self) -> bool:
        return self._listening > (self.limit + _SPARE if self.limit else 1)

    def _grow(self) -> None:
        """One more thread, which counts as one that listens; with the lock held."""
        self._listening += 1
        number = len(self._threads)
        name = f"hvlike-loop-{number}" if number else "hvlike-loop"
        thread = system.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            item = self._take()
            if item is not None:
                try:
                    item()
                finally:
                    del item
                    with self._lock:
                        self._listening += 1
                        self._ended = system.monotonic()
            elif self._leave():
                return
            # Beside a running item a look would only take the interpreter away from it.
            self._listen(self._called, self._hot and not self.running)

    def _take(self) -> WorkItem | None:
        """The next item, if there is one to run; another thread listens before this one runs it."""
        with self._lock:
            if self._items:
                item = self._items.popleft()
            elif self._limited and self.running < self.limit:
                item = self._limited.popleft()
                self.running += 1
            else:
                return None
            self._hot = system.monotonic() - self._ended < _HOT_SECONDS
            self._listening -= 1
            if self._listening == 0 and not self._closing:
                self._grow()
        if self._called():
            self._summon()
        return item

    def _leave(self) -> bool:
        """Whether the calling thread, which has nothing to do, is to end."""
        with self._lock:
            if not self._closing and not self._are_too_many():
                return False
            self._listening -= 1
            self._threads.remove(threading.current_thread())
            return True

    def _run_limited(self, item: WorkItem) -> None:
        try:
            item()
        finally:
            with self._lock:
                self.running -= 1
