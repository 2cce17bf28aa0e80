"""What the guard replaces in the interpreter to see how a program ends, and puts back.

    sys.excepthook          uncaught exceptions of the main thread
    threading.excepthook    those of other threads
    sys.exit                the status of the interpreter (ExitObserver)
    faulthandler            fatal signals: the stacks of all threads
    a real-time signal      asks this process for its stacks (watchdog.py)

What the program has replaced in the meantime stays as it is. A hook of the program's may call ours, also after ours was
put back, and in a forked child: `previous` and `previous_in_threads` stay for that.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hvlike.observe import printing
from hvlike.transport.failure import watchdog
from hvlike.transport.failure.exit_status import ExitObserver

ExceptHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class Hooks:
    def __init__(
        self, on_exception: ExceptHook, on_thread_exception: Callable[[Any], object], on_exit: Callable[[int], None]
    ) -> None:
        """on_exit: told of a sys.exit() with which the interpreter ends; see ExitObserver."""
        self.exit = ExitObserver(on_exit)
        self.previous: ExceptHook = sys.excepthook
        self.previous_in_threads: Callable[[Any], object] = threading.excepthook
        self._on_exception = on_exception
        self._on_thread_exception = on_thread_exception
        self._last_error: object = getattr(sys, "last_value", None)
        self._answers_signal = False
        self._shows_stacks = False

    def install(self) -> None:
        self.previous, sys.excepthook = sys.excepthook, self._on_exception
        self.previous_in_threads, threading.excepthook = threading.excepthook, self._on_thread_exception
        self.exit.install()
        self._answers_signal = watchdog.answer_stack_signal()
        stderr = printing.descriptor_of_stderr()
        if not faulthandler.is_enabled() and stderr is not None:
            faulthandler.enable(stderr)
            self._shows_stacks = True

    def put_back(self) -> None:
        """Undo `install`; does nothing before it."""
        if not self._is_replaced():
            sys.excepthook = self.previous
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self.previous_in_threads
        self.exit.uninstall()
        if self._answers_signal:
            self._answers_signal = False
            watchdog.ignore_stack_signal()
        if self._shows_stacks:
            self._shows_stacks = False
            faulthandler.disable()

    def has_missed_error(self) -> bool:
        """Whether an uncaught exception went to a hook that somebody installed in front of ours."""
        last = getattr(sys, "last_value", None)
        return self.exit.status is None and self._is_replaced() and last is not None and last is not self._last_error

    def _is_replaced(self) -> bool:
        # A bound method is a new object at each access, so compare by value.
        return sys.excepthook != self._on_exception
