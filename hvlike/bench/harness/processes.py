"""Processes beside the ranks of a benchmark, which answer requests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from hvlike.errors import LaunchError
from hvlike.launch.supervisor import stop
from hvlike.transport.host.find_mpirun import Mpirun, ask_mpi_library, find_mpirun

T = TypeVar("T")

ANSWER_SECONDS = 300.0
_START_SECONDS = 120.0
_POLL_SECONDS = 0.2
_END_SECONDS = 20.0
_LAST_OUTPUT_SECONDS = 5.0
_LAST_CHARACTERS = 2000


def requests(connected: Connection) -> Iterator[Any]:
    """Receive what is asked until the other end has closed. A process that waits sleeps."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            yield connected.recv()


class Helpers:
    """Processes beside this job that answer requests. What they print is kept for the text of a failure."""

    def __init__(self, name: str) -> None:
        """Start nothing yet. name: what error texts call them."""
        self.name = name
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ends: list[Connection] = []
        # A file, not a pipe: nobody reads while they run.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start one of them. how: keywords of Popen. Raises: OSError."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, **how
        )
        self.processes.append(process)
        return process

    def start_job(self, command: Callable[[str], Sequence[str]], ranks: int, **how: Any) -> list[Connection]:
        """Start a job whose ranks connect to the address that `command` is given. Returns their connections, in the
        order in which they came. Raises: LaunchError, OSError.
        """
        connected: list[Connection] = []
        with tempfile.TemporaryDirectory(prefix="hvlike-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "socket")
            listener.bind(address)
            listener.listen(ranks)
            process = self.start(command(address), **how)
            end = time.monotonic() + _START_SECONDS
            while len(connected) < ranks:
                if wait([listener], _POLL_SECONDS):
                    connected.append(Connection(listener.accept()[0].detach()))
                elif process.poll() is not None or time.monotonic() > end:
                    raise self.failure("did not start")
        self.ends += connected
        return connected

    def ask(self, end: Connection, request: object = None) -> Any:
        """Send a request, if there is one, and return the next message. Raises: LaunchError with their last output."""
        try:
            if request is not None:
                end.send(request)
            if end.poll(ANSWER_SECONDS):
                return end.recv()
        except EOFError:
            raise self.failure("ended early") from None
        except OSError as error:
            raise self.failure("no answer") from error
        raise self.failure("no answer")

    def failure(self, what: str) -> LaunchError:
        """Return an error with what they printed last."""
        # A rank hangs up before its launcher has passed on what it printed last.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[0].wait(_LAST_OUTPUT_SECONDS)
        self._output.seek(0)
        return LaunchError(f"{self.name}: {what}; the last output:\n{self._output.read()[-_LAST_CHARACTERS:]}")

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Hang up, give them so long to end by themselves, then end them: SIGTERM, then SIGKILL."""
        for end in self.ends:
            end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(seconds)
        for process in self.processes:
            stop(process, process.send_signal)
        self._output.close()


def find_launcher() -> Mpirun:
    return find_mpirun(ask_mpi_library(os.environ), os.environ)


def module_command(mpirun: Mpirun, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    return mpirun.command(ranks, [sys.executable, "-m", module, *arguments])
