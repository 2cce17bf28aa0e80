"""The guard comes and goes without a trace; for failing ranks see tests/jobs/transport/test_endings.py."""

import inspect
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.observe import printing
from hvlike.transport.failure.guard import ON_DUTY, Guard, watch_start
from hvlike.transport.host import launchers


class Recorder:
    """An mpi4py.MPI of several ranks which only notes that it is told to abort."""

    def __init__(self, size: int = 3) -> None:
        self.aborted: list[int] = []
        self.COMM_WORLD = SimpleNamespace(Get_size=lambda: size, Abort=self.aborted.append)

    def Is_finalized(self) -> bool:
        return False


def guard_of(mpi: Any, on_end: Callable[[], None] = lambda: None) -> Guard:
    return Guard(mpi, 1, "rank 1 of 3 on here", on_end)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a process without hvlike, also where hvlike runs already."""
    monkeypatch.setattr(sys, "exit", inspect.unwrap(sys.exit))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    # However busy the machine is.
    monkeypatch.setattr(printing, "REPORT_SECONDS", 60.0)
    monkeypatch.setattr(ON_DUTY, "guard", None)
    # Under mpirun too nobody else is to claim the report.
    monkeypatch.setattr(launchers, "detect_launcher", lambda environment: None)


def hooks() -> tuple[object, ...]:
    return sys.exit, sys.excepthook, threading.excepthook


def test_hooks_come_back() -> None:
    before = hooks()
    guard = guard_of(Recorder())
    guard.install()
    guard.install()
    assert all(now is not then for now, then in zip(hooks(), before, strict=True))
    guard.uninstall()
    guard.uninstall()
    assert hooks() == before


def test_alone_nothing_is_installed() -> None:
    before = hooks()
    guard_of(Recorder(size=1)).install()
    assert hooks() == before
    assert ON_DUTY.guard is None


def test_hooks_installed_later_by_others_stay() -> None:
    guard = guard_of(Recorder())
    guard.install()

    def theirs(*_: object) -> None: ...

    sys.excepthook = theirs
    guard.uninstall()
    assert sys.excepthook is theirs


def test_a_second_guard_sends_the_first_home() -> None:
    before = hooks()
    first, second = (guard_of(Recorder()) for _ in range(2))
    first.install()
    second.install()
    first.uninstall()
    assert ON_DUTY.guard is not None
    second.uninstall()
    assert hooks() == before


def test_a_start_does_not_replace_the_guard_on_duty() -> None:
    guard = guard_of(Recorder())
    guard.install()
    during = hooks()
    watch_start()
    assert hooks() == during
    guard.uninstall()


def test_an_exception_in_a_thread_is_reported_once_and_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    mpi = Recorder()
    guard = guard_of(mpi)
    guard.install()
    thread = threading.Thread(target=lambda: 1 / 0, name="loader")
    thread.start()
    thread.join()
    guard.uninstall()
    said = capsys.readouterr().err
    assert mpi.aborted == [1]
    assert said.startswith("hvlike: uncaught exception in thread loader on rank 1 of 3 on here\nTraceback")
    assert said.count("ZeroDivisionError") == 1


def test_a_thread_may_end_with_sys_exit(capsys: pytest.CaptureFixture[str]) -> None:
    mpi = Recorder()
    guard = guard_of(mpi)
    guard.install()
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    guard.uninstall()
    assert mpi.aborted == []
    assert capsys.readouterr().err == ""


def test_a_hook_that_was_there_before_prints_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    mpi = Recorder()
    seen: list[object] = []
    threading.excepthook = lambda args: seen.append(args.exc_type)
    guard = guard_of(mpi)
    guard.install()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    guard.uninstall()
    assert seen == [ZeroDivisionError]
    assert "Traceback" not in capsys.readouterr().err
    assert mpi.aborted == [1]


def test_a_farewell_that_fails_aborts() -> None:
    mpi = Recorder()

    def fail() -> None:
        raise RuntimeError("no way out")

    guard = guard_of(mpi, fail)
    guard.install()
    with pytest.raises(RuntimeError, match="no way out"):
        guard.at_exit()
    assert mpi.aborted == [1]
    guard.uninstall()


class Quit(BaseException):
    """Nothing that `except Exception` stops."""


class Hostile:
    """A stream of the program of which every use raises."""

    def __getattr__(self, name: str) -> Any:
        raise Quit(name)


@pytest.mark.parametrize("kind", [ValueError, Quit, KeyboardInterrupt])
def test_a_program_that_has_replaced_all_it_can_is_ended(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi, real, asked = Recorder(), io.StringIO(), []
    monkeypatch.setattr(sys, "__stderr__", real)

    def hook(*_: object) -> None:
        asked.append("hook")
        raise Quit

    def write() -> None:
        asked.append("timeline")
        raise Quit

    def fail() -> None:
        raise kind("boom")

    monkeypatch.setattr(threading, "excepthook", hook)
    guard = guard_of(mpi)
    guard.before_end.append(write)
    guard.install()
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, Hostile())
        patch.setattr(traceback, "format_exception", hook)
        thread = threading.Thread(target=fail, name="loader")
        thread.start()
        thread.join()
    guard.uninstall()
    assert mpi.aborted == [1]
    assert {"hook", "timeline"} <= set(asked)
    said = real.getvalue()
    assert said.startswith("hvlike: uncaught exception in thread loader on rank 1 of 3 on here\nTraceback (most recent")
    assert said.count("boom") == 1
    assert "the program's hook failed" in said


def test_where_no_thread_can_be_started_the_job_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = Recorder()
    guard = guard_of(mpi)
    guard.install()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        sys.excepthook(ValueError, ValueError("boom"), None)
    guard.uninstall()
    assert mpi.aborted == [1]


def test_an_abort_that_fails_ends_the_process() -> None:
    mpi = Recorder()

    def fail(status: int) -> None:
        raise Quit

    mpi.COMM_WORLD.Abort = fail
    process = os.fork()
    if process == 0:
        guard = guard_of(mpi)
        guard.install()
        guard.end_job("", "")
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
