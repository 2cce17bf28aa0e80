"""The guard: no rank waits for ever for a rank that has ended.

MPI_Finalize waits for all ranks, so a rank that fails and exits like any Python program leaves the job hanging. The
guard sees how this rank ends and ends the whole job where that is needed:

    uncaught exception           traceback with the rank, exit handlers, Abort(1)
    KeyboardInterrupt            the same with status 130
    sys.exit(n), n not 0         exit handlers, Abort(n)
    exception in a thread        traceback with the rank, Abort(1) at once (the main thread may wait for ever)
    normal end, sys.exit(0)      the callback given by the caller tells the other ranks, then MPI_Finalize
    launcher killed with -9      `watch_parent()` ends the process
    fatal signal (SIGSEGV, ...)  the stacks of all threads, by Python's faulthandler; the launcher ends the job
    exception out of elastic.run under fault tolerance, on one rank: traceback, SIGKILL to itself; the others go on

One report is shown: that of the rank which fails first (FirstReport). Where the error says that another rank
failed first (`CONSEQUENCES`), that rank has `PRECEDENCE` seconds to report the cause. The ranks of the first node have
the same advantage where all ranks raise alike.

Exit handlers and non-daemon threads of a failing rank have `GRACE` seconds before the job is aborted anyway.

From the moment at which a rank fails nothing of the program is trusted: streams, hooks and exceptions may raise or
block whatever they do. Abort stands behind a `finally`, and all before it has a limit of time (observe/printing.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from hvlike.errors import HorovodInternalError, JoinError, PeerLeftError, ShutdownError, WorkerLostError
from hvlike.observe import printing
from hvlike.system.system import of_process, system
from hvlike.transport.failure.exit_status import note_good_end
from hvlike.transport.failure.fault_tolerance import RUNNING
from hvlike.transport.failure.first_report import FirstReport, describe_others, job_name
from hvlike.transport.failure.hooks import Hooks
from hvlike.transport.host import launchers, mpi_library
from hvlike.transport.host.parents import LauncherWatch

GRACE = 5.0  # Seconds between the end of a failing program and Abort, for exit handlers and threads that still run
PRECEDENCE = 0.5  # Seconds by which the report of a cause may be later than that of its consequence
CONSEQUENCES = (JoinError, PeerLeftError, ShutdownError, WorkerLostError)


class _Report(NamedTuple):
    """What this rank has said of its failure."""

    summary: str = ""  # The first line, for the others
    at: float = 0.0  # When, in seconds of system.monotonic()


class Guard:
    """Watches how this rank ends, from install() to uninstall(), if the job has several processes. A process has at
    most one guard that watches: install() uninstalls an earlier one.
    """

    def __init__(
        self, mpi: ModuleType, rank: int, name: str, on_end: Callable[[], None], *, on_first_node: bool = True
    ) -> None:
        """name: of the rank, for reports. on_end: called once, from an atexit handler, when this rank ends well; must
        not wait for ever. on_first_node: this rank is on the node of rank 0, or does not know it yet.
        """
        self._mpi = mpi
        self._rank = rank
        self._name = name
        self._on_end = on_end
        self._on_first_node = on_first_node
        self._owner = os.getpid()
        self._hooks = Hooks(self.on_exception, self._on_thread_exception, self.on_sys_exit)
        self.before_end: list[Callable[[], object]] = []  # What is still written when this rank fails, in some thread
        self._status: int | None = None  # With which this rank ends, once it fails
        self._report: _Report | None = None  # What was said of that
        self._watching = False
        self._is_orphan = False
        self._parents: LauncherWatch | None = None
        self._first: FirstReport = (system.first_report or partial(FirstReport, f"alone-{self._owner}"))()

    def install(self) -> None:
        """Start watching, if the job has more than one process. Call it after MPI has started."""
        if self._watching or self._mpi.COMM_WORLD.Get_size() == 1:
            return
        if ON_DUTY.guard is not None:
            ON_DUTY.guard.uninstall()
        ON_DUTY.guard = self
        self._watching = True
        # mpi4py finalises MPI after all atexit handlers, and the last one registered runs first.
        system.at_exit(self.at_exit)
        if system.mpi is None:
            self._hooks.install()
            if launchers.detect_launcher(os.environ) is not None:
                self._parents = LauncherWatch()
                self._first = FirstReport(job_name(self._parents.launcher))

    def uninstall(self) -> None:
        """Stop watching and put the hooks back, except those that were replaced in the meantime."""
        if not self._watching:
            return
        self._watching = False
        ON_DUTY.guard = None
        self._hooks.put_back()
        system.not_at_exit(self.at_exit)
        self._parents = None
        self._first.release()

    def end_job(self, text: str, summary: str) -> None:
        try:
            self._report_text(text, summary)
        finally:
            self._abort(1)

    def end_process(self, text: str, summary: str) -> None:
        """Report, and end this process alone, in the one way that MPI takes for a failure at once."""
        try:
            self._report_text(text, summary)
            self._write_rest()
        finally:
            system.kill(system.process(), signal.SIGKILL)

    def watch_parent(self) -> None:
        """End this process if its launcher is gone. Cheap; the loop calls it about once a second, on any thread."""
        if self._parents is None or not self._parents.is_orphan():
            return
        # No Abort: without its launcher MPI has nobody to tell, and the other ranks look for themselves. Nor does
        # anybody remove the library's files any more.
        self._is_orphan = True
        try:
            text = f"hvlike: {self._name} ends: the launcher (process {os.getppid()} took its place) is gone"
            printing.report(text)
            self._write_rest()
            mpi_library.unlink_start_up_segments(alone=True)
        finally:
            system.exit_now(1)

    def _is_mine(self) -> bool:
        return self._watching and os.getpid() == self._owner

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What sys.excepthook is while the guard is installed: report the error, and end the job."""
        if not self._is_mine():
            self._hooks.previous(kind, error, trace)
            return
        try:
            own = self._hooks.previous is not sys.__excepthook__
            self._tell("uncaught exception", not own, kind, error, trace)
            if own:
                self._let_hook_tell(lambda: self._hooks.previous(kind, error, trace), kind, error, trace)
        finally:
            if not _is_interactive():
                self._end_soon(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, args: Any) -> None:
        if not self._is_mine() or issubclass(args.exc_type, SystemExit):
            self._hooks.previous_in_threads(args)
            return
        what = args.exc_type, args.exc_value, args.exc_traceback
        try:
            own = self._hooks.previous_in_threads is not threading.__excepthook__
            self._tell(f"uncaught exception in {_name_of(args.thread)}", not own, *what)
            if own:
                self._let_hook_tell(lambda: self._hooks.previous_in_threads(args), *what)
        finally:
            if not _is_interactive():
                self._abort(1)

    def _let_hook_tell(
        self,
        hook: Callable[[], object],
        kind: type[BaseException],
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Have a hook of the program print the exception; where it fails, the traceback is printed all the same."""
        try:
            hook()
        except BaseException as failure:
            if self._first.is_held:
                reason = printing.summary_of(type(failure), failure)
                printing.report(
                    f"{printing.traceback_of(kind, error, trace)}hvlike: the program's hook failed: {reason}"
                )

    def on_sys_exit(self, status: int) -> None:
        """The program has called sys.exit(): a status other than 0 ends the job."""
        if self._is_mine() and status:
            self._end_soon(status)

    def _tell(
        self,
        what: str,
        with_trace: bool,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BaseException):
            if _follows(kind) or (_is_internal(kind) and not self._on_first_node):
                # The rank that reports the cause ends this process meanwhile.
                system.sleep(PRECEDENCE)
            if _is_internal(kind) and self._parents is not None and self._parents.is_orphan():
                # The job has ended, and its cause was told: a rank that was stopped goes on after that.
                self._report = _Report()
                return
            text = f"hvlike: {what} on {self._name}\n"
            if with_trace:
                text += printing.traceback_of(kind, error, trace)
            self._report_text(text, printing.summary_of(kind, error))

    def _report_text(self, text: str, summary: str) -> None:
        """Say it, unless another rank of this node has reported already: that one is told the first line."""
        self._report = report = _Report(summary.strip().partition("\n")[0], system.monotonic())
        if self._is_orphan:
            # Another thread ends this process.
            return
        # At a prompt each rank goes on, and so do the reports.
        if _is_interactive() or self._first.claim(self._rank, report.summary):
            # One write, or the lines of several failing ranks are shuffled.
            printing.report(text.rstrip("\n"))

    def _end_soon(self, status: int) -> None:
        self._status = status
        try:
            system.Thread(target=self._abort_later, args=(status,), name="hvlike-guard", daemon=True).start()
        except BaseException:
            # No thread is to be had, when memory is used up for example: nothing would end a program that waits.
            self._abort(status)

    def _abort_later(self, status: int) -> None:
        system.sleep(GRACE)
        if self._is_mine():
            self._abort(status)

    def at_exit(self) -> None:
        if not self._is_mine():
            return
        if self._status is None and self._hooks.has_missed_error():
            self._status = 1
        if self._status:
            self._report_and_abort(f"ended with status {self._status}", ": the whole job ends", self._status)
        if RUNNING.job is not None and RUNNING.job.goes_on_without_this:
            self._report_and_abort("has left elastic.run while other ranks train", "", 1)
        ended = False
        try:
            self._on_end()
            ended = True
        finally:
            if not ended:
                # Python would print this exception and go on to MPI_Finalize, to wait there for the others.
                try:
                    self._tell("an exception at the end of the program", True, *sys.exc_info())
                finally:
                    self._abort(1)
        self._watching = False
        note_good_end()

    def _report_and_abort(self, said: str, more: str, status: int) -> None:
        try:
            if self._report is None:
                said += self._hooks.exit.text
                self._report_text(f"hvlike: {self._name} {said}{more}", said)
        finally:
            self._abort(status)

    def _abort(self, status: int) -> None:
        ends_alone = False
        try:
            # First: the rank that reports may end the job meanwhile.
            self._write_rest()
            with contextlib.suppress(BaseException):
                ends_alone = self._tell_of_others()
        finally:
            if ends_alone:
                # The one way to end that the runtime takes for a lost process at once.
                system.kill(system.process(), signal.SIGKILL)
            self._abort_mpi(status)

    def _tell_of_others(self) -> bool:
        """Name the other ranks that have failed; returns whether the others go on without this one."""
        job = RUNNING.job
        goes_on = job is not None and job.goes_on_without_this and job.others_live()
        report = self._report or _Report()
        if goes_on:
            # Where several ranks fail alike it is the program's error, and no rank would be left.
            system.sleep(max(0.0, report.at + PRECEDENCE - system.monotonic()))
        others = self._first.others()
        if goes_on and not others and self._first.claim(self._rank, report.summary):
            printing.report(f"hvlike: {self._name} ends; the others go on without it")
            return True
        if others:
            printing.report(f"hvlike: after {self._name} failed also {describe_others(others, report.summary)}")
        # Where another rank has reported, the status of the job is its: that one ends the job after its exit handlers.
        self._first.wait_for_holder(report.at + 2 * GRACE)
        return False

    def _abort_mpi(self, status: int) -> None:
        try:
            if self._mpi.Is_finalized():
                return
            if RUNNING.job is not None and not RUNNING.job.others_live():
                # The launcher calls the job a success when its only process asks for an abort.
                system.exit_now(status)
            self._mpi.COMM_WORLD.Abort(status)
        except BaseException:
            system.exit_now(status)

    def _write_rest(self) -> None:
        """Write what this process has not written yet: timelines, and what the program has printed."""
        printing.bounded(lambda: [act() for act in list(self.before_end)], printing.REPORT_SECONDS)
        printing.flush()


class _OnDuty:
    def __init__(self) -> None:
        self.guard: Guard | None = None


ON_DUTY = of_process(_OnDuty)
"""Has the guard of this process, if one watches."""


def watch_start() -> None:
    """Watch a rank that has MPI but is not through with init(): should that fail, the others wait in theirs. Does
    nothing while a guard watches already; the one that init() installs takes over.
    """
    mpi = mpi_library.running_mpi() if system.mpi is None else system.mpi()
    if mpi is None or mpi_library.ForkMark.forked or ON_DUTY.guard is not None:
        return
    rank = mpi.COMM_WORLD.Get_rank()
    name = f"rank {rank} of {mpi.COMM_WORLD.Get_size()} on {mpi.Get_processor_name()}"
    Guard(mpi, rank, name, lambda: None).install()


def give_up(text: str, summary: str) -> None:
    """Report, and end the job with status 1, wherever this process is on its way through init(); from any thread."""
    try:
        watch_start()
        if ON_DUTY.guard is not None:
            ON_DUTY.guard.end_job(text, summary)
        else:
            printing.report(text)
    finally:
        # Before MPI has started there is no Abort: the launcher ends the other ranks.
        system.exit_now(1)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _follows(kind: type[BaseException] | None) -> bool:
    # Of the class: an exception may say by its `__class__` whatever it likes.
    return kind is not None and issubclass(kind, CONSEQUENCES)


def _is_internal(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, HorovodInternalError)


def _name_of(thread: threading.Thread | None) -> str:
    with contextlib.suppress(BaseException):
        return "a thread" if thread is None else f"thread {thread.name}"
    return "a thread"
