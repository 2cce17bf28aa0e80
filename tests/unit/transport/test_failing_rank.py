"""A process that fails: the guard and exit handlers come and go without a trace, and one process of a node reports.

For failing ranks see tests/jobs/transport/test_endings.py.
"""

import copy
import errno
import inspect
import io
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.children import raised_in_child

from hvlike.observe import printing
from hvlike.transport.failure.exit_status import ExitObserver
from hvlike.transport.failure.first_report import FirstReport, describe_others, job_name
from hvlike.transport.failure.guard import ON_DUTY, Guard, watch_start
from hvlike.transport.host import launchers


class Recorder:
    """An mpi4py.MPI of several ranks which only notes that it is told to abort."""

    def __init__(self, size: int = 3) -> None:
        self.aborted: list[int] = []
        self.COMM_WORLD = SimpleNamespace(Get_size=lambda: size, Abort=self.aborted.append)

    def Is_finalized(self) -> bool:
        return False


@pytest.fixture
def mpi() -> Recorder:
    return Recorder()


def guard_of(mpi: Any, on_end: Callable[[], None] = lambda: None) -> Guard:
    return Guard(mpi, 1, "rank 1 of 3 on here", on_end)


@contextmanager
def on_duty(mpi: Any, on_end: Callable[[], None] = lambda: None) -> Iterator[Guard]:
    """A guard that watches meanwhile."""
    guard = guard_of(mpi, on_end)
    guard.install()
    yield guard
    guard.uninstall()


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


class Quit(BaseException):
    """Nothing that `except Exception` stops."""


def in_thread(target: Callable[..., object], *arguments: object, name: str = "loader") -> None:
    """Run it in a thread, to its end."""
    thread = threading.Thread(target=target, args=arguments, name=name)
    thread.start()
    thread.join()


def hooks() -> tuple[object, ...]:
    return sys.exit, sys.excepthook, threading.excepthook


def test_hooks_come_back_and_sys_exit_looks_as_before(mpi: Recorder) -> None:
    before = hooks()
    guard = guard_of(mpi)
    guard.install()
    guard.install()
    assert all(now is not then for now, then in zip(hooks(), before, strict=True))
    assert sys.exit.__name__ == "exit"
    assert sys.exit.__doc__ == inspect.unwrap(sys.exit).__doc__
    guard.uninstall()
    guard.uninstall()
    assert hooks() == before


def test_alone_nothing_is_installed() -> None:
    before = hooks()
    guard_of(Recorder(size=1)).install()
    assert hooks() == before
    assert ON_DUTY.guard is None


@pytest.mark.parametrize("when", ["before", "later"])
def test_hooks_that_others_have_installed_stay(when: str, mpi: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: object) -> None: ...

    if when == "before":
        monkeypatch.setattr(sys, "exit", theirs)
    with on_duty(mpi):
        monkeypatch.setattr(sys, "excepthook", theirs)
        if when == "later":
            monkeypatch.setattr(sys, "exit", theirs)
        assert sys.exit is theirs
    assert sys.exit is sys.excepthook is theirs


def test_a_second_guard_sends_the_first_home(mpi: Recorder) -> None:
    before = hooks()
    with on_duty(mpi) as first, on_duty(mpi):
        first.uninstall()
        assert ON_DUTY.guard is not None
    assert hooks() == before


def test_a_start_does_not_replace_the_guard_on_duty(mpi: Recorder) -> None:
    with on_duty(mpi):
        during = hooks()
        watch_start()
        assert hooks() == during


def test_a_thread_may_end_with_sys_exit(mpi: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    with on_duty(mpi):
        in_thread(sys.exit, 3)
    assert mpi.aborted == []
    assert capsys.readouterr().err == ""


def test_a_hook_that_was_there_before_prints_the_traceback(mpi: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    threading.excepthook = lambda args: seen.append(args.exc_type)
    with on_duty(mpi):
        in_thread(lambda: 1 / 0)
    assert seen == [ZeroDivisionError]
    assert "Traceback" not in capsys.readouterr().err
    assert mpi.aborted == [1]


def test_a_farewell_that_fails_aborts(mpi: Recorder) -> None:
    def fail() -> None:
        raise RuntimeError("no way out")

    with on_duty(mpi, fail) as guard, pytest.raises(RuntimeError, match="no way out"):
        guard.at_exit()
    assert mpi.aborted == [1]


class Hostile:
    """A stream of the program of which every use raises."""

    def __getattr__(self, name: str) -> Any:
        raise Quit(name)


@pytest.mark.parametrize("kind", [ValueError, Quit, KeyboardInterrupt])
def test_a_program_that_has_replaced_all_it_can_is_ended(
    kind: type[BaseException], mpi: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = io.StringIO(), []
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
    with on_duty(mpi) as guard, monkeypatch.context() as patch:
        guard.before_end.append(write)
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, Hostile())
        patch.setattr(traceback, "format_exception", hook)
        in_thread(fail)
    assert mpi.aborted == [1]
    assert {"hook", "timeline"} <= set(asked)
    said = real.getvalue()
    assert said.startswith("hvlike: uncaught exception in thread loader on rank 1 of 3 on here\nTraceback (most recent")
    assert said.count("boom") == 1
    assert "the program's hook failed" in said


def test_where_no_thread_can_be_started_the_job_is_ended_at_once(
    mpi: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with on_duty(mpi), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        sys.excepthook(ValueError, ValueError("boom"), None)
    assert mpi.aborted == [1]


def test_an_abort_that_fails_ends_the_process(mpi: Recorder) -> None:
    def fail(status: int) -> None:
        raise Quit

    mpi.COMM_WORLD.Abort = fail
    process = os.fork()
    if process == 0:
        with on_duty(mpi) as guard:
            guard.end_job("", "")
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


@pytest.fixture
def observer() -> Iterator[ExitObserver]:
    observer = ExitObserver()
    observer.install()
    yield observer
    observer.uninstall()


def test_the_exception_looks_like_any_other(observer: ExitObserver) -> None:
    with pytest.raises(SystemExit) as caught:
        sys.exit("why")
    error = caught.value
    assert (repr(error), str(error), error.args, error.code) == ("SystemExit('why')", "why", ("why",), "why")
    assert f"{type(error).__module__}.{type(error).__qualname__}" == "builtins.SystemExit"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is SystemExit
        assert twin.code == "why"
    assert observer.status is None


def test_wrong_arguments_are_refused_as_before(observer: ExitObserver) -> None:
    with pytest.raises(TypeError, match="argument"):
        sys.exit(1, 2)  # type: ignore[call-arg]


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def first(job: str) -> Iterator[FirstReport]:
    report = FirstReport(job)
    yield report
    report.release()


def test_the_first_one_reports_and_hears_of_the_others(job: str, first: FirstReport) -> None:
    assert first.claim(3, "ValueError: boom")
    assert first.claim(3, "again")
    assert first.others() == []
    second = FirstReport(job)
    assert not second.claim(0, "KeyError: 'x'")
    assert not second.claim(1, "")
    assert not second.claim(2, "ValueError: \ud800")
    assert first.others() == [(0, "KeyError: 'x'"), (1, ""), (2, "ValueError: \\ud800")]
    assert first.others() == []
    assert second.others() == []


def test_other_jobs_have_reports_of_their_own(first: FirstReport) -> None:
    assert first.claim(0, "")
    other = FirstReport(uuid.uuid4().hex)
    assert other.claim(0, "")
    other.release()


def test_the_right_ends_with_its_process(job: str, first: FirstReport) -> None:
    def claim() -> None:
        assert FirstReport(job).claim(0, "")

    assert raised_in_child(claim) == ""
    assert first.claim(0, "")


def test_more_failures_than_a_socket_holds_are_no_error(job: str, first: FirstReport) -> None:
    assert first.claim(0, "")
    second = FirstReport(job)
    assert not any(second.claim(rank, "x" * 10_000) for rank in range(1000))
    assert first.others()[0][0] == 0


def test_what_others_send_there_does_no_harm(job: str, first: FirstReport) -> None:
    assert first.claim(0, "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for text in (b"", b"no number", b"-1 x", b"\xff\xff", b"7 \x1b[2Jtext"):
            stranger.sendto(text, first.address)
    assert first.others() == [(7, "[2Jtext")]


def test_waiting_ends_with_the_holder_and_at_the_deadline(job: str, first: FirstReport) -> None:
    second = FirstReport(job)
    # Nobody holds it: no wait, however far the deadline is.
    second.wait_for_holder(time.monotonic() + 10_000)
    assert first.claim(0, "")
    second.wait_for_holder(time.monotonic() + 0.1)
    # Who holds it himself does not wait for himself.
    first.wait_for_holder(time.monotonic() + 10_000)


def test_the_others_are_described_in_a_line() -> None:
    others = [(4, "A: b"), (2, "KeyError: 'x'"), (0, "A: b")]
    assert describe_others(others, "A: b") == "ranks 0, 4 (the same), rank 2 (KeyError: 'x')"
    assert describe_others(others[:1], "A: b") == "rank 4 (the same)"
    many = describe_others([(rank, f"E{rank}") for rank in range(9)], "A: b")
    assert many == "rank 0 (E0), rank 1 (E1), rank 2 (E2), rank 3 (E3) and 5 more"


def test_a_job_is_named_by_its_launcher_and_when_that_began() -> None:
    assert job_name(os.getpid()) == job_name(os.getpid())
    assert job_name(os.getpid()) != job_name(os.getppid())
    assert job_name(2**22 + 1) == f"{2**22 + 1}-0"


def test_without_sockets_everybody_reports(first: FirstReport, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    assert first.claim(0, "")
    assert first.others() == []
    first.wait_for_holder(time.monotonic() + 60)
