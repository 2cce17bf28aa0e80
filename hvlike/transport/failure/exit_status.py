"""How this process ends: the status with which the interpreter is about to exit, and the record of it for `launch`.

Python tells an atexit handler nothing about how the program ends. Yet a rank that ends with sys.exit(1) must take the
job along, and one that ends with sys.exit(0) must not. Therefore `sys.exit` is replaced by a function that raises a
SystemExit whose `code` is a property. When the interpreter handles the exit at top level it reads `code` from C, with
no Python frame below. At that read the exit is certain, and the status is recorded. Code that catches the SystemExit
(argparse users, test runners) reads `code` from a frame, or not at all, and nothing is recorded.

Not seen: `raise SystemExit(n)` written by hand, exit() and quit() of the site module, `from sys import exit` done
before the replacement. The status stays None then.

What a job and `python -m hvlike launch` tell each other (`JobRecord`) are two files, whatever the launcher in between
is and answers:

    PATH        written by rank 0, once: how the job has ended, a word of `FINISHED`, `PREEMPTED`
    PATH.ask    made by `launch`: the job is to end at its next commit, with a checkpoint

PATH is HVLIKE_LAUNCH_RECORD. A job that leaves no PATH has failed: the status of a launcher says little where MPI
survives the loss of ranks, and nothing where the launcher itself was killed. This file imports nothing of hvlike.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_CODE: Any = vars(SystemExit)["code"]
_SHOWN_CHARACTERS = 160


class _ObservedExit(SystemExit):
    """A SystemExit that tells its observer when the interpreter itself reads `code`."""

    observer: ExitObserver

    @property
    def code(self) -> Any:
        value = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            self.observer.record(to_status(value), text_of(value))
        return value

    @code.setter
    def code(self, value: Any) -> None:
        _CODE.__set__(self, value)

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:
        return SystemExit, self.args


# Whoever prints the type or its name sees what he would have seen without us.
_ObservedExit.__name__ = _ObservedExit.__qualname__ = "SystemExit"
_ObservedExit.__module__ = "builtins"


def to_status(code: object) -> int:
    """The status (0 to 255) that a process has after sys.exit(code): None is 0, an integer itself, all else 1."""
    if code is None:
        return 0
    return int(code) & 0xFF if isinstance(code, int) else 1


def text_of(code: object) -> str:
    """What sys.exit(code) prints, on one line in parentheses: a stderr of the program's may not print it. Else ""."""
    if code is None or isinstance(code, int):
        return ""
    with contextlib.suppress(BaseException):
        first = str(code).strip().partition("\n")[0]
        return f" ({first[:_SHOWN_CHARACTERS]})"
    return ""


class ExitObserver:
    """Replaces sys.exit and remembers the status once the interpreter ends through it."""

    status: int | None = None  # 0 to 255 once the interpreter exits through sys.exit
    text = ""  # What it prints then

    def __init__(self, on_exit: Callable[[int], None] | None = None) -> None:
        """on_exit: called with the status, on the main thread, before other threads are joined and atexit runs."""
        self._on_exit = on_exit
        self._previous: Callable[..., NoReturn] | None = None
        self._replacement: Callable[..., NoReturn] | None = None

    def install(self) -> None:
        """Replace sys.exit; a sys.exit that somebody else has replaced already is left alone."""
        if self._replacement is None and isinstance(sys.exit, types.BuiltinFunctionType):
            self._previous, self._replacement = sys.exit, self._make_exit(sys.exit)
            sys.exit = self._replacement

    def uninstall(self) -> None:
        """Put sys.exit back, unless somebody replaced it after us."""
        if self._previous is not None and sys.exit is self._replacement:
            sys.exit = self._previous
        self._previous = self._replacement = None

    def record(self, status: int, text: str = "") -> None:
        self.status, self.text = status, text
        _OfThisProcess.status = status
        if self._on_exit is not None:
            self._on_exit(status)

    def _make_exit(self, original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def observed_exit(status: Any = None, /) -> NoReturn:
            # threading silences SystemExit itself but prints the traceback of a subclass.
            if isinstance(status, SystemExit) or threading.current_thread() is not threading.main_thread():
                original(status)
            arguments = () if status is None else status if isinstance(status, tuple) else (status,)
            error = _ObservedExit(*arguments)
            error.observer = self
            raise error

        # help(sys.exit) reads as before.
        functools.update_wrapper(observed_exit, original)
        return observed_exit


VARIABLE = "HVLIKE_LAUNCH_RECORD"
FINISHED, PREEMPTED = "finished", "preempted"

EXIT_PREEMPTED = 75
"""The exit status of a job that has ended because it was asked to, and is to be started again (EX_TEMPFAIL)."""


class JobRecord:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._request = path.with_name(f"{path.name}.ask")

    def write(self, ending: str) -> None:
        """Write how the job has ended; the first word stays. Raises OSError."""
        if self.path.exists():
            return
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(ending)
        part.replace(self.path)

    def read(self) -> str | None:
        return self.path.read_text() if self.path.exists() else None

    def ask(self) -> None:
        self._request.touch()

    def is_asked(self) -> bool:
        return self._request.exists()

    @property
    def files(self) -> list[str]:
        """The paths of all that a record may consist of."""
        return [str(self.path), str(self._request), f"{self.path}.part"]

    def remove(self) -> None:
        for path in self.files:
            Path(path).unlink(missing_ok=True)


class _OfThisProcess:
    status: int | None = None
    record: JobRecord | None = None
    writer = 0  # The process that writes it; 0: rank 0 does, and this is another one
    last_error: object = None


def keep_record(path: str, *, writes: bool) -> None:
    """Watch how this process ends; writes: it is rank 0. Call it before the guard is installed, whose exit handler then
    comes first and ends the process if it fails.
    """
    _OfThisProcess.record = JobRecord(Path(path))
    _OfThisProcess.writer = os.getpid() if writes else 0
    _OfThisProcess.last_error = getattr(sys, "last_value", None)
    atexit.unregister(note_good_end)
    atexit.register(note_good_end)


def record_of_this_job() -> JobRecord | None:
    """The record, if `launch` has started this job."""
    return _OfThisProcess.record


def status_of_this_process() -> int | None:
    """The status with which the interpreter is about to exit, once it does so through sys.exit."""
    return _OfThisProcess.status


def note_good_end() -> None:
    """The program of this process ends, and no guard has seen a failure. Local."""
    # After shutdown() no guard looks.
    failed = getattr(sys, "last_value", None) is not _OfThisProcess.last_error
    if _OfThisProcess.record is not None and _OfThisProcess.writer == os.getpid() and not failed:
        _OfThisProcess.record.write(FINISHED)
