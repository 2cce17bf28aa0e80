"""Guard: no rank waits for ever for one that has ended.

MPI_Finalize waits for all ranks, so a rank that fails and exits like any Python program leaves the job hanging. The
guard sees how this rank ends and ends the whole job where that is needed:

    uncaught exception           traceback with the rank, exit handlers, Abort(1)
    KeyboardInterrupt            the same with status 130
    sys.exit(n), n not 0         exit handlers, Abort(n)
    exception in a thread        traceback with the rank, Abort(1) at once (the main thread may wait for ever)
    normal end, sys.exit(0)      `farewell()`: tell the others, then MPI_Finalize
    launcher killed with -9      `watch_parent()` ends the process

Exit handlers and non-daemon threads of a failing rank have `GRACE` seconds before the job is aborted anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Protocol

from hvlike.transport import forks, launchers, mpi
from hvlike.transport.exit_status import ExitObserver
from hvlike.transport.parents import ParentWatch

GRACE = 5.0
"""Seconds between the end of a failing program and Abort, for exit handlers and threads that still run."""


class Member(Protocol):
    """What the guard knows of a World: who this rank is, and how to end the job."""

    @property
    def mpi(self) -> ModuleType: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def host(self) -> str: ...


class Guard:
    """Watches how this rank ends.

    States: idle -> install() -> watching -> uninstall() -> idle. In a job of one process install() does nothing.
    A process has at most one guard that watches: install() sends an earlier one home.
    """

    _on_duty: ClassVar[Guard | None] = None

    def __init__(self, world: Member, farewell: Callable[[], None]) -> None:
        """farewell: called once, from an atexit handler, when this rank ends well; must not wait for ever."""
        self._world = world
        self._farewell = farewell
        self._name = f"rank {world.rank} of {world.size} on {world.host}"
        self._owner = os.getpid()
        self._exit = ExitObserver(self._on_sys_exit)
        self._failure: int | None = None
        self._watching = False
        self._previous_hook = sys.excepthook
        self._previous_thread_hook: Callable[[Any], Any] = threading.excepthook
        self._last_error: object = None
        self._parents: ParentWatch | None = None

    @classmethod
    def is_on_duty(cls) -> bool:
        """Whether a guard watches this process."""
        return cls._on_duty is not None

    def install(self) -> None:
        """Start watching, if the job has more than one process. Call it after MPI has started."""
        if self._watching or self._world.mpi.COMM_WORLD.Get_size() == 1:
            return
        if Guard._on_duty is not None:
            Guard._on_duty.uninstall()
        Guard._on_duty = self
        self._watching = True
        self._last_error = getattr(sys, "last_value", None)
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        self._exit.install()
        # mpi4py finalises MPI after all atexit handlers, and the last one registered runs first.
        atexit.register(self._at_exit)
        if launchers.detect(os.environ) is not None:
            self._parents = ParentWatch()

    def uninstall(self) -> None:
        """Stop watching and put the hooks back, unless somebody has put his own in front of them."""
        if not self._watching:
            return
        self._watching = False
        Guard._on_duty = None
        # A bound method is made anew at each look, so compare by value.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_thread_hook
        self._exit.uninstall()
        atexit.unregister(self._at_exit)
        self._parents = None

    def watch_parent(self) -> None:
        """End this process if its launcher is gone. Cheap; the loop calls it about once a second, on any thread."""
        if self._parents is not None and self._parents.is_orphan():
            self._say(f"hvlike: {self._name} ends: the launcher (process {os.getppid()} took its place) is gone")
            # No Abort: without its launcher MPI has nobody to tell, and the other ranks look for themselves.
            os._exit(1)

    def _is_mine(self) -> bool:
        return self._watching and os.getpid() == self._owner

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._is_mine():
            self._previous_hook(kind, error, trace)
            return
        self._report("uncaught exception", self._previous_hook is sys.__excepthook__, kind, error, trace)
        if self._previous_hook is not sys.__excepthook__:
            self._previous_hook(kind, error, trace)
        if not _is_interactive():
            self._end_soon(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, args: Any) -> None:
        if not self._is_mine() or issubclass(args.exc_type, SystemExit):
            self._previous_thread_hook(args)
            return
        thread = "a thread" if args.thread is None else f"thread {args.thread.name}"
        default = self._previous_thread_hook is threading.__excepthook__
        self._report(f"uncaught exception in {thread}", default, args.exc_type, args.exc_value, args.exc_traceback)
        if not default:
            self._previous_thread_hook(args)
        if not _is_interactive():
            self._abort(1)

    def _on_sys_exit(self, status: int) -> None:
        if self._is_mine() and status:
            self._end_soon(status)

    def _report(
        self,
        what: str,
        with_trace: bool,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        text = f"hvlike: {what} on {self._name}\n"
        if with_trace:
            text += "".join(traceback.format_exception(kind, error, trace))
        # One write, or the lines of several failing ranks are shuffled.
        self._say(text.rstrip("\n"))

    def _say(self, text: str) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except OSError:
            # The reader of the pipe is gone, most likely the launcher itself: nobody is left to be told.
            return

    def _end_soon(self, status: int) -> None:
        """Let exit handlers run; abort from `_at_exit`, or when they take too long."""
        self._failure = status
        threading.Thread(target=self._abort_later, args=(status,), name="hvlike-guard", daemon=True).start()

    def _abort_later(self, status: int) -> None:
        time.sleep(GRACE)
        if self._is_mine():
            self._abort(status)

    def _at_exit(self) -> None:
        if not self._is_mine():
            return
        if self._failure is None and self._was_failure_hidden():
            self._failure = 1
        if self._failure:
            self._say(f"hvlike: {self._name} ended with status {self._failure}: the whole job ends")
            self._abort(self._failure)
        parted = False
        try:
            self._farewell()
            parted = True
        finally:
            if not parted:
                # Python would print this exception and go on to MPI_Finalize, to wait there for the others.
                kind, error, trace = sys.exc_info()
                self._report("an exception at the end of the program", True, kind, error, trace)
                self._abort(1)
        self._watching = False

    def _was_failure_hidden(self) -> bool:
        """Whether an uncaught exception went to a hook that somebody installed in front of ours."""
        replaced = sys.excepthook != self._on_exception
        last = getattr(sys, "last_value", None)
        return self._exit.status is None and replaced and last is not None and last is not self._last_error

    def _abort(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                try:
                    stream.flush()
                except OSError:
                    # Same as in `_say`: no reader, and the job must end all the same.
                    continue
        if not self._world.mpi.Is_finalized():
            self._world.mpi.COMM_WORLD.Abort(status)


@dataclass(frozen=True)
class _Newcomer:
    """A rank that has MPI but no World."""

    mpi: ModuleType
    rank: int
    size: int
    host: str


def watch_start() -> None:
    """Watch a rank that has MPI but is not through with init(): should that fail, the others wait in theirs.

    Does nothing while a guard watches already, and without MPI. The guard that init() installs at its end takes over.
    """
    module = mpi.running()
    if module is None or forks.is_forked() or Guard.is_on_duty():
        return
    everybody = module.COMM_WORLD
    newcomer = _Newcomer(module, everybody.Get_rank(), everybody.Get_size(), module.Get_processor_name())
    Guard(newcomer, lambda: None).install()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
