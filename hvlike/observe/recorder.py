"""The timeline of one rank: a recorder that takes events from any thread, and the Chrome-trace file it writes.

While the timeline is off, a call costs one test of the attribute `on`. The file is valid JSON after every write: each
write replaces the closing brackets by the new events and the brackets.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvlike.errors import UsageError
from hvlike.observe.looking import only_looks
from hvlike.system.system import system

_CLOSING = b"\n]}\n"


class TraceFile:
    """A file that is valid JSON after every write, which replaces the closing brackets in one system call."""

    def __init__(self, path: str, about: Mapping[str, Any], first: Mapping[str, Any], max_bytes: int) -> None:
        """Start the file, and empty it if it exists. about: its metadata. first: its first event.

        Raises: UsageError if the file cannot be written.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor = _open(path, os.O_TRUNC)
        head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": []}).encode()
        start = head.removesuffix(b"]}") + b"\n" + _text_of(first)
        os.pwrite(self._descriptor, start + _CLOSING, 0)
        self._size = len(start)

    def write(self, events: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> bool:
        """Add events. If the file would get too large, add `last` in their place and return False.

        Raises: OSError, if the disk is full for example. The file stays as it was.
        """
        block = b"".join(b",\n" + _text_of(event) for event in events)
        fits = self._size + len(block) + len(_CLOSING) <= self._max_bytes
        if not fits:
            block = b",\n" + _text_of(last)
        data = block + _CLOSING
        try:
            written = os.pwrite(self._descriptor, data, self._size)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written to {self.path}")
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            os.pwrite(self._descriptor, _CLOSING, self._size)
            raise
        self._size += len(block)
        return fits

    def close(self) -> None:
        os.close(self._descriptor)


@only_looks(b"{}")
def _text_of(event: Mapping[str, Any]) -> bytes:
    """An event as JSON; what a program has named or passed in it may be anything that is no plain value."""
    return json.dumps(event, default=_name_of).encode()


def _name_of(value: object) -> int | float | str:
    """For what JSON does not know: numbers of numpy as such, of others the name of the type."""
    found = _number_of(value)
    return f"<{type(value).__qualname__}>" if found is None else found


@only_looks(None)
def _number_of(value: Any) -> int | float | None:
    item = value.item()
    return item if isinstance(item, int | float) else None


def check_writable(path: str, rank: int) -> None:
    """Check that a rank can write its file, and leave its content. Raises: UsageError."""
    os.close(_open(path_of_rank(path, rank), 0))


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
    except OSError as error:
        raise UsageError(f"timeline: the file {path} cannot be written: {error.strerror}.") from None


def path_of_rank(path: str, rank: int) -> str:
    """Return the file of a rank: timeline.json for rank 0, timeline.rank1.json for rank 1."""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")) if rank else path


def path_of_restart(path: str, number: int) -> str:
    """Return the file of rank 0 after a restart: timeline.restart1.json after the first one."""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.restart{number}{whole.suffix}")) if number else path


logger = logging.getLogger("hvlike")

PENDING_EVENTS = 2048  # Events that are kept in memory. The thread that adds one more writes them.
Arguments = Mapping[str, Any] | None


class Recorder:
    """The timeline of one rank, off until `start`."""

    def __init__(self, rank: int, size: int, host: str, offset: int) -> None:
        """offset: added to system.monotonic_ns() to get the nanoseconds since the job began, on all ranks alike."""
        self.on = False
        self.marks_cycles = False
        self.generation = 0  # The number of starts. Rows of an earlier one are invalid.
        self.on_switch: Callable[[], None] = lambda: None  # Called after it was switched on or off
        self._rank = rank
        self._about = {"rank": rank, "size": size, "host": host, "clock": "monotonic", "clock_offset_ns": offset}
        self._offset = offset
        # A signal handler may start an operation while its thread writes.
        self._lock = system.RLock()
        self._pending: deque[dict[str, Any]] = deque()
        self._rows: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._file: TraceFile | None = None

    def start(self, path: str, *, mark_cycles: bool, max_bytes: int) -> None:
        """Record into the file of this rank. Raises: UsageError if it does already, or the file cannot be written."""
        with self._lock:
            if self._file is not None:
                raise UsageError(
                    f"start_timeline({path!r}): rank {self._rank} records a timeline into {self._file.path} already. "
                    "Call stop_timeline() first."
                )
            name = self._about_process("process_name", f"rank {self._rank} ({self._about['host']})")
            self._file = TraceFile(path_of_rank(path, self._rank), self._about, name, max_bytes)
            self._pending.clear()
            self._rows = {}
            self._numbers = itertools.count(1)
            self._pending.append(self._about_process("process_sort_index", self._rank))
            self.generation += 1
            self.marks_cycles = mark_cycles
            self.on = True
            self.on_switch()

    def stop(self) -> None:
        """Write the pending events and close the file. Does nothing while the timeline is off."""
        with self._lock:
            self.on = False
            self.on_switch()
            self._write()
            self._close()

    def flush(self) -> None:
        """Write the pending events. The loop calls this a few times a second."""
        if self._pending:
            with self._lock:
                self._write()

    @property
    def now(self) -> int:
        """Nanoseconds since the job began."""
        return system.monotonic_ns() + self._offset

    def row(self, title: str) -> int:
        number = self._rows.get(title)
        if number is None:
            number = self._rows.setdefault(title, next(self._numbers))
            self._add({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": title}})
            self._add({"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}})
        return number

    @property
    def rows(self) -> int:
        return len(self._rows)

    def begin(self, row: int, name: str, arguments: Arguments = None, at: int | None = None) -> None:
        """Everything that begins before its end lies inside of it."""
        self._event("B", row, name, arguments, at)

    def end(self, row: int, arguments: Arguments = None, at: int | None = None) -> None:
        """End what has begun last in the row."""
        self._event("E", row, None, arguments, at)

    def instant(self, row: int, name: str, arguments: Arguments = None, at: int | None = None) -> None:
        self._event("i", row, name, arguments, at, s="t")

    def flow_from(self, row: int, identity: str, at: int) -> None:
        """An arrow starts here. It ends where `flow_to` gets the same identity, on any rank."""
        self._event("s", row, "order", None, at, cat="flow", id=identity)

    def flow_to(self, row: int, identity: str, at: int) -> None:
        """An arrow ends in what has begun here last."""
        self._event("f", row, "order", None, at, cat="flow", id=identity, bp="e")

    def _event(self, phase: str, row: int, name: str | None, arguments: Arguments, at: int | None, **more: str) -> None:
        nanoseconds = self.now if at is None else at
        event: dict[str, Any] = {"ph": phase, "tid": row, "ts": nanoseconds / 1000}
        if name is not None:
            event["name"] = name
        if arguments:
            event["args"] = arguments
        self._add(event | more)

    def _add(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        event["pid"] = self._rank
        self._pending.append(event)
        if len(self._pending) >= PENDING_EVENTS:
            self.flush()

    def _about_process(self, name: str, value: str | int) -> dict[str, Any]:
        key = "sort_index" if isinstance(value, int) else "name"
        return {"ph": "M", "name": name, "pid": self._rank, "tid": 0, "args": {key: value}}

    def _write(self) -> None:
        """Write the pending events, with the lock held. A file that cannot grow ends the recording, not the job."""
        # Other threads go on adding: take only what is there now.
        file, count = self._file, len(self._pending)
        if file is None or not count:
            return
        events = [self._pending.popleft() for _ in range(count)]
        last = {"ph": "i", "s": "g", "name": "TIMELINE_FULL", "pid": self._rank, "tid": 0, "ts": self.now / 1000}
        try:
            fits = file.write(events, last)
        except OSError as error:
            logger.warning("rank %d: the timeline %s ends here: %s", self._rank, file.path, error)
            fits = False
        if not fits:
            self.on = False
            self.on_switch()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
