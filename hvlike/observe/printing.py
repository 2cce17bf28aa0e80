"""Printing that cannot fail, whatever a program has put in place of sys.stdout and sys.stderr.

Programs replace both by objects of their own: one that copies to a file and has no `flush`, one that is closed, that
knows ASCII alone, that writes to a full disk, whose methods raise anything. What tells of a failure must be read all
the same, once, and must end. So each text goes to the first of these that takes it:

    the program's sys.stderr     then the same with letters that it does not know written as \\xe4
    sys.__stderr__               unless the text has come through to it already: an object that copies may have failed
                                 after that
    descriptor 2                 unless Python began without it: then the number may be that of any file

Nothing here raises, not even a BaseException; only Ctrl-C still interrupts `write`. What is `bounded` does not wait
longer than it says either.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from hvlike.system.system import system

REPORT_SECONDS = 5.0  # That streams of the program get, to take a report or to be flushed
_DESCRIPTOR_SECONDS = 1.0  # For a pipe that is full


class ProgramStreams:
    """Those of the program, in this process."""

    are_stuck = False  # One has taken longer than that: they are left alone from now on


def write(text: str) -> None:
    """Print text and a newline to stderr. Blocks as long as the program's stream does."""
    with _Dropped():
        _Line(text + "\n").write()


def report(text: str, seconds: float | None = None) -> None:
    """The same, for what a process says before it ends: after `seconds` the program's stream is given up."""
    with contextlib.suppress(BaseException):
        line = _Line(text + "\n")
        if not _bounded_by_streams(line.write, seconds):
            line.write_late()


def flush(seconds: float | None = None) -> None:
    """Flush stdout and stderr, those of the program and Python's own."""
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    _bounded_by_streams(lambda: [_flush(each) for each in streams], seconds)


def _bounded_by_streams(action: Callable[[], object], seconds: float | None) -> bool:
    if not ProgramStreams.are_stuck:
        ProgramStreams.are_stuck = not bounded(action, REPORT_SECONDS if seconds is None else seconds)
        return not ProgramStreams.are_stuck
    return False


def bounded(action: Callable[[], object], seconds: float) -> bool:
    """Run an action, whose exceptions are dropped, and wait no longer than `seconds`. Whether it has come to its end;
    it may go on in its thread if not. Not run at all where no thread can be started.
    """
    over = allocate_lock()
    over.acquire()

    def run() -> None:
        try:
            with contextlib.suppress(BaseException):
                action()
        finally:
            over.release()

    with contextlib.suppress(BaseException):
        system.start_thread(run, ())
        return over.acquire(timeout=seconds)
    return False


def print_to(stream: Any, text: str) -> bool:
    """Print text to a stream, letters that it does not know as \\xe4. False: it did not take it, or not all."""
    with _Dropped():
        try:
            stream.write(text)
        except UnicodeError:
            stream.write(_ascii(text))
        return _flush(stream)
    return False


def descriptor_of_stderr() -> int | None:
    """The descriptor to which Python's own stderr writes, also where the program has closed that; None without one."""
    if sys.__stderr__ is None:
        return None
    with contextlib.suppress(Exception):
        return sys.__stderr__.fileno()
    with contextlib.suppress(OSError):
        os.fstat(2)
        return 2
    return None


def traceback_of(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> str:
    """What Python prints of an exception; less of it where its methods, or modules that were replaced, fail."""
    with contextlib.suppress(BaseException):
        return "".join(traceback.format_exception(kind, error, trace))
    lines = ["Traceback (most recent call last):"]
    with contextlib.suppress(BaseException):
        while trace is not None:
            code = trace.tb_frame.f_code
            lines.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
            trace = trace.tb_next
    return "\n".join([*lines, summary_of(kind, error)]) + "\n"


def summary_of(kind: type[BaseException] | None, error: BaseException | None) -> str:
    """The last line of a traceback: class and text of the exception."""
    with contextlib.suppress(BaseException):
        return "".join(traceback.format_exception_only(kind, error)).strip()
    name = "an exception"
    with contextlib.suppress(BaseException):
        name = type.__dict__["__name__"].__get__(kind)
        return f"{name}: {error}"
    return name


class _Line:
    """One text on its way to stderr."""

    def __init__(self, text: str) -> None:
        self._text = text
        # One that copies line by line ends with this.
        self._last = text.rstrip("\n").rpartition("\n")[2]
        self._has_passed = False  # It has come to sys.__stderr__, written there by the program's object
        self._is_given_up = False

    def write(self) -> None:
        with self._watched():
            done = sys.stderr is not None and print_to(sys.stderr, self._text)
        if done or self._has_passed or self._is_given_up:
            return
        if sys.stderr is sys.__stderr__ or not print_to(sys.__stderr__, self._text):
            self._write_to_descriptor()

    def write_late(self) -> None:
        """Write it without the program's object, in which another thread may be stuck."""
        self._is_given_up = True
        if not self._has_passed:
            self._write_to_descriptor()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Notice that the text comes to sys.__stderr__ through the program's sys.stderr."""
        real: Any = sys.__stderr__
        if real is None or real is sys.stderr or "write" in vars(real):
            yield
            return
        through = real.write

        def observe(text: str) -> int:
            if self._has_passed and text in (self._text, _ascii(self._text)):
                # The object tries again, for what it copies to.
                return len(text)
            count: int = through(text)
            self._has_passed |= self._last in text
            return count

        real.write = observe
        try:
            yield
        finally:
            del real.write

    def _write_to_descriptor(self) -> None:
        descriptor, data = descriptor_of_stderr(), self._text.encode(errors="backslashreplace")
        until = time.monotonic() + _DESCRIPTOR_SECONDS
        while descriptor is not None and data:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            # A pipe that polls as writable takes so many bytes without blocking.
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]


def _flush(stream: Any) -> bool:
    """Whether a stream has nothing left to write, as far as it tells: one without `flush` keeps nothing."""
    with _Dropped():
        if stream is None or not hasattr(stream, "flush"):
            return True
        stream.flush()
        return True
    return False


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def is_interrupt(error: BaseException) -> bool:
    """Whether it is somebody who presses Ctrl-C, and no exception of an object of the program."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


class _Dropped:
    """Drops what an object of the program raises."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return error is not None and not is_interrupt(error)


def format_size(size: int) -> str:
    """Return bytes for people, as "64 KiB" or "1.5 MiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Return a time for people, as "12.5 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"
