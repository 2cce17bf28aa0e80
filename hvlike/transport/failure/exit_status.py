"""The status with which the interpreter is about to exit, known while atexit handlers run.

Python tells an atexit handler nothing about how the program ends. Yet a rank that ends with sys.exit(1) must take the
job along, and one that ends with sys.exit(0) must not. Therefore `sys.exit` is replaced by a function that raises a
SystemExit whose `code` is a property. When the interpreter handles the exit at top level it reads `code` from C, with
no Python frame below. At that read the exit is certain, and the status is recorded. Code that catches the SystemExit
(argparse users, test runners) reads `code` from a frame, or not at all, and nothing is recorded.

Not seen: `raise SystemExit(n)` written by hand, exit() and quit() of the site module, `from sys import exit` done
before the replacement. The status stays None then.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

_CODE: Any = vars(SystemExit)["code"]


class _ObservedExit(SystemExit):
    """A SystemExit that tells its observer when the interpreter itself reads `code`."""

    observer: ExitObserver

    @property
    def code(self) -> Any:
        value = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            self.observer.record(to_status(value))
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


class ExitObserver:
    """Replaces sys.exit and remembers the status once the interpreter ends through it."""

    status: int | None = None  # 0 to 255 once the interpreter exits through sys.exit

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

    def record(self, status: int) -> None:
        self.status = status
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
