"""Other processes: lost ones are noticed, stuck ones print their stacks, a long wait is said, the launcher watched."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvlike.transport.failure import loss_watch, watchdog
from hvlike.transport.failure.loss_watch import LossWatch
from hvlike.transport.failure.watchdog import Liveness, init_watchdog
from hvlike.transport.host import parents


def test_a_vanished_process_is_reported_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        liveness = Liveness({5: child.pid})
        assert liveness.lost() == []
        child.kill()
    assert liveness.lost() == [5]
    assert liveness.lost() == []


def test_a_process_that_could_not_be_seen_at_the_start_is_not_watched() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert Liveness({0: child.pid}).lost() == []


class Told:
    """What MPI is told, and whether it listens."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.listens = True
        self.given_up = threading.Event()
        self.said = threading.Event()

    def report(self, ranks: list[int]) -> bool:
        self.lost += ranks
        self.said.set()
        return self.listens

    def give_up(self, text: str, summary: str) -> None:
        self.given_up.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(loss_watch, "report_lost", found.report)
    # The one of this process, if it has one, goes on.
    monkeypatch.setattr(loss_watch.WATCHING, "watch", None)
    return found


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("listens", [True, False])
def test_a_process_that_is_gone_is_told_once(listens: bool, told: Told, child: subprocess.Popen[str]) -> None:
    told.listens = listens
    watch = LossWatch({3: (child.pid, "1")}, told.give_up)
    assert told.lost == []
    child.kill()
    child.wait()
    assert told.said.wait(60)
    assert listens or told.given_up.wait(60)
    watch.stop()
    assert told.lost == [3]
    assert told.given_up.is_set() == (not listens)


def test_who_ends_after_it_was_stopped_is_not_lost(told: Told, child: subprocess.Popen[str]) -> None:
    watch = LossWatch({3: (child.pid, None)}, told.give_up)
    watch.stop()
    child.kill()
    child.wait()
    assert not told.said.wait(3 * loss_watch.LOOK_SECONDS)


def test_a_new_watch_takes_the_place_of_the_last(told: Told, child: subprocess.Popen[str]) -> None:
    LossWatch({3: (child.pid, None)}, told.give_up)
    second = LossWatch({5: (child.pid, None)}, told.give_up)
    child.kill()
    child.wait()
    assert told.said.wait(60)
    second.stop()
    assert told.lost == [5]


@contextmanager
def forked(prepare: Callable[[], object]) -> Iterator[tuple[int, int]]:
    """A forked process that prepares itself and then sleeps in `be_stuck`; its pid, and what reads its stderr."""
    reader, writer = os.pipe()
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        sys.__stderr__ = os.fdopen(2, "w", closefd=False)
        prepare()
        be_stuck(go)
    os.close(writer)
    os.close(go)
    os.read(ready, 1)
    os.close(ready)
    try:
        yield pid, reader
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


def be_stuck(go: int) -> None:
    # Only from in here its stacks show it.
    os.write(go, b"!")
    while True:
        time.sleep(100)


def read_until(reader: int, word: bytes) -> bytes:
    said = b""
    while word not in said and (more := os.read(reader, 4096)):
        said += more
    return said


def test_its_stacks_are_printed_and_it_goes_on() -> None:
    with forked(watchdog.answer_stack_signal) as (pid, reader):
        for _ in range(2):
            assert watchdog.request_stacks(pid) == f"it prints its stacks to stderr: process {pid}, all threads"
            # The innermost call comes first, this one after it.
            said = read_until(reader, b"in test_its_stacks_are_printed_and_it_goes_on")
            assert b"in be_stuck" in said


def test_one_that_does_not_handle_the_signal_is_not_killed_by_it() -> None:
    with forked(watchdog.ignore_stack_signal) as (pid, _):
        assert watchdog.request_stacks(pid) == f"process {pid} cannot be asked for its stack"
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)


def test_a_handler_of_the_user_stays() -> None:
    def listens() -> None:
        signal.signal(watchdog.STACK_SIGNAL, lambda *_: None)
        os._exit(watchdog.answer_stack_signal())

    pid = os.fork()
    if pid == 0:
        listens()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_stopped_one_is_seen() -> None:
    with forked(watchdog.answer_stack_signal) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert watchdog.request_stacks(pid) == "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"


def test_one_that_is_not_there_is_not_asked() -> None:
    assert watchdog.request_stacks(2**22 + 1) == f"process {2**22 + 1} cannot be seen from here"


def test_a_process_with_its_launcher_is_no_orphan() -> None:
    watch = parents.LauncherWatch()
    assert not watch.is_orphan()


RANK = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "PMIX_NAMESPACE": "job@1"}


def test_the_chain_ends_at_the_first_parent_that_is_not_of_this_rank() -> None:
    processes = {
        10: parents.ParentProcess("python", 9),
        9: parents.ParentProcess("uv", 8),
        8: parents.ParentProcess("prterun", 7),
        7: parents.ParentProcess("bash", 6),
    }
    environments: dict[int | str, dict[str, str]] = {"self": RANK, 10: RANK, 9: RANK, 8: {}, 7: {}}
    # Nothing of the process is replaced: its own watch, in another thread, would find itself an orphan and end it.
    watch = parents.LauncherWatch(lambda: 10, processes.get, lambda process: environments[process])
    assert watch.chain == (10, 9, 8)
    assert watch.launcher == 8
    assert not watch.is_orphan()
    processes[8] = parents.ParentProcess("prterun", 1)  # nohup: mpirun has another parent, and lives
    assert not watch.is_orphan()
    del processes[8]  # It is hidden from here, or a zombie that nobody has looked at
    assert not watch.is_orphan()
    processes[9] = parents.ParentProcess("uv", 1)  # mpirun is gone
    assert watch.is_orphan()
    # Without a launcher the next parent is watched.
    assert parents.LauncherWatch(lambda: 10, processes.get, lambda process: {}).chain == (10,)


def test_names_with_blanks_and_parentheses_are_read() -> None:
    assert parents.parse_stat("42 (a (b) c) S 7 42 42 0") == parents.ParentProcess("a (b) c", 7)
    assert parents.read_process(os.getpid()) == parents.ParentProcess(
        Path("/proc/self/comm").read_text().rstrip("\n"), os.getppid()
    )


class Heard(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.event.set()


def test_a_long_wait_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    logger, heard = logging.getLogger("hvlike"), Heard()
    logger.addHandler(heard)
    try:
        with init_watchdog(0.001, 0.0, lambda text, summary: None):
            assert heard.event.wait(60)
    finally:
        logger.removeHandler(heard)
    assert heard.text.startswith("rank 2 of 3 on ")
    assert "has waited 0 s in init() for other ranks" in heard.text


def test_past_the_limit_it_gives_up_and_says_where_it_is() -> None:
    gave_up = threading.Event()
    said: list[str] = []

    def give_up(text: str, summary: str) -> None:
        said.extend((text, summary))
        gave_up.set()

    with init_watchdog(1000.0, 0.001, give_up):
        assert gave_up.wait(60)
    assert said[1] == "StalledError: init() took more than 0.001 s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS)"
    # On a busy machine this thread is still about to begin its wait.
    assert re.search(r'File ".*", line \d+, in \w+', said[0])


def test_an_init_in_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with init_watchdog(1000.0, 1000.0, lambda text, summary: pytest.fail(text)):
        pass
    assert caplog.text == ""
