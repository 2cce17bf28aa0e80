"""A process that does not answer prints its stacks when it is asked by signal; one that cannot is left alone."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvlike.transport.failure import watchdog


@contextmanager
def child(prepare: Callable[[], object]) -> Iterator[tuple[int, int]]:
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
    with child(watchdog.answer_stack_signal) as (pid, reader):
        for _ in range(2):
            assert watchdog.request_stacks(pid) == f"it prints its stacks to stderr: process {pid}, all threads"
            # The innermost call comes first, this one after it.
            said = read_until(reader, b"in test_its_stacks_are_printed_and_it_goes_on")
            assert b"in be_stuck" in said


def test_one_that_does_not_handle_the_signal_is_not_killed_by_it() -> None:
    with child(watchdog.ignore_stack_signal) as (pid, _):
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
    with child(watchdog.answer_stack_signal) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert watchdog.request_stacks(pid) == "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"


def test_one_that_is_not_there_is_not_asked() -> None:
    assert watchdog.request_stacks(2**22 + 1) == f"process {2**22 + 1} cannot be seen from here"
