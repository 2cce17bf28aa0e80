"""Ask a question that may never be answered: in a child process, with a limit.

The call that is looked into can hang, crash, or end the process (MPI_Init does all three), with the interpreter's lock
held. So it runs in a forked child, which sends one record after the other; the parent waits for each up to the limit,
and kills a child that is silent for longer. What the child prints is kept and shown only where it failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn, TypeVar

from hvlike.errors import HvlikeError
from hvlike.transport.host.parents import LauncherWatch

T = TypeVar("T")
LIMIT = 30.0  # Seconds a probe may take for one record, unless the user says otherwise
FAILED = "failed: "  # So the reason of a gap begins where an exception was raised
_POLL_SECONDS = 0.1
_LAST_LINES = 8
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_DYING_SECONDS = 2.0


@dataclass(frozen=True)
class Gap:
    reason: str  # Why, as the end of a sentence: "was given up after 20 s"
    output: tuple[str, ...] = ()  # The last lines the child printed
    status: int | None = None  # With which the child ended by itself, minus the number of a signal; None: it did not


class Unanswered(Exception):
    """A check needs what could not be found out: its argument, a Gap."""


class Skipped(Exception):
    """A check does not apply: its arguments, texts, say why."""


def known(value: T | Gap | None) -> T:
    """Return the answer. Raises: Unanswered where there is none, Skipped where nobody has asked."""
    if value is None:
        raise Skipped("nothing to judge: the doctor did not come so far here")
    if isinstance(value, Gap):
        raise Unanswered(value)
    return value


class Prober:
    """Runs probes in children, each with `limit` seconds for each record."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self.interrupted = False  # This process was asked to end, as a launcher does when another rank has failed
        self._parents = LauncherWatch()

    def watch_for_interruption(self) -> None:
        """Take note of SIGTERM from now on, in place of ending. Main thread only."""
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(self, "interrupted", True))

    def wait_for_interruption(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.interrupted and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def ask(self, question: Callable[[], T]) -> T | Gap:
        """Ask a question in a child. Returns the answer, which must pickle, or why there is none. Blocks."""
        records, gap = self.follow(lambda: (ask() for ask in [question]))
        return records[0] if records else gap or Gap("gave no answer")

    def follow(self, stages: Callable[[], Iterator[T]]) -> tuple[tuple[T, ...], Gap | None]:
        """Return what a generator yields in a child, and why it did not come to its end; None: it did. Blocks."""
        if self.interrupted:
            return (), Gap("was not tried any more: the launcher is ending the job")
        with tempfile.TemporaryFile() as printed:
            reader, writer = Pipe(duplex=False)
            child = os.fork()
            if child == 0:
                reader.close()
                _answer(stages, writer, printed)
            writer.close()
            records: list[T] = []
            try:
                while isinstance(message := self._receive(child, reader), tuple):
                    records += message
            finally:
                reader.close()
                _end(child)
            if message is not None:
                printed.seek(0)
                lines = printed.read().decode(errors="replace").splitlines()
                shown = [line.rstrip() for line in lines if line.strip(" -=*")][-_LAST_LINES:]
                message = replace(message, output=tuple(shown))
            return tuple(records), message

    def _receive(self, child: int, reader: Connection) -> tuple[Any] | Gap | None:
        """Return the next record in a tuple, or at the end why it is one; None: the generator has ended."""
        until = time.monotonic() + self.limit
        while not reader.poll(_POLL_SECONDS):
            if self.interrupted:
                return Gap(_ending(-signal.SIGTERM), status=-signal.SIGTERM)
            if self._parents.is_orphan():
                sys.exit(1)
            if time.monotonic() > until:
                return Gap(f"was given up after {self.limit:g} s without an answer")
        try:
            message: tuple[Any] | Gap | None = reader.recv()
        except EOFError:
            # The child has ended without a word.
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            return Gap(_ending(code), status=code)
        return message


def _answer(stages: Callable[[], Iterator[Any]], writer: Connection, printed: IO[bytes]) -> NoReturn:
    """Send what the generator yields from the child, which ends without the exit handlers of the parent."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The child must not outlive the parent.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
        # The parent's streams may be objects of a test runner.
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        for record in stages():
            writer.send((record,))
        writer.send(None)
        status = 0
    except BaseException as error:
        if not isinstance(error, HvlikeError):
            # Errors of hvlike say all there is to say.
            traceback.print_exc()
        writer.send(Gap(f"{FAILED}{type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(child: int) -> None:
    """Kill the child if it still runs, and take its status; one that hangs in the kernel is left there."""
    until = time.monotonic() + _DYING_SECONDS
    # It may have been waited for already.
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.kill(child, signal.SIGKILL)
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)


def _ending(code: int) -> str:
    if code == -signal.SIGTERM:
        return "was ended by the launcher, which ends the whole job"
    return f"ended the process with status {code}" if code >= 0 else f"crashed with {signal.Signals(-code).name}"
