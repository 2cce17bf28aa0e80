"""Processes that a benchmark starts: jobs that print one JSON answer, and helpers that answer requests on a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hvlike.errors import LaunchError, UsageError
from hvlike.transport.host import find_mpirun, launchers
from hvlike.transport.host.find_mpirun import Mpirun

Message = dict[str, Any]


class Conversation:
    """One end of a connected socket. Whoever waits sleeps."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("r")

    def say(self, message: Message) -> None:
        """Send one message. Raises: OSError when the other end is gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Message | None:
        """Return the next message, or None when the other end has closed. Raises: OSError."""
        line = self._lines.readline()
        if not line:
            return None
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self._lines.close()
        self._socket.close()


_GRACE_SECONDS = 10
_LAST_LINES = 60


def refuse_inside_a_job(environment: Mapping[str, str], benchmark: str) -> None:
    """Raise UsageError when this process is a rank already."""
    launcher = launchers.detect_launcher(environment)
    if launcher is not None:
        raise UsageError(
            f"bench {benchmark} starts its jobs itself, and this process is a rank of a job of {launcher.name} "
            f"({launcher.variable}={launcher.size}): run `python -m hvlike bench {benchmark}` without mpirun."
        )


def find() -> Mpirun:
    """The launcher of the MPI library that is loaded here. Raises: LaunchError when there is none."""
    return find_mpirun.find_mpirun(find_mpirun.ask_mpi_library(os.environ), os.environ)


def module_command(starter: Mpirun, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs a module on so many ranks."""
    return starter.command(ranks, [sys.executable, "-m", module, *arguments])


def run_job(
    starter: Mpirun, ranks: int, module: str, arguments: Sequence[str], knobs: Mapping[str, str], seconds: float
) -> Any:
    """Run a module on so many ranks; returns the JSON object that rank 0 has printed as its last line. Blocks.

    knobs: variables of the environment to add. seconds: after which the job is ended.
    Raises: LaunchError with the last lines of the job when it fails, takes too long, or prints no answer.
    """
    command = module_command(starter, ranks, module, arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **knobs}
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open and block the reader.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"`{' '.join(command)}` has not ended within {seconds:.0f} s and was stopped. {ranks} ranks may be too "
                "many for this machine: leave them out, or allow more time with --timeout."
            ) from None
        finally:
            _stop(process)
        said, complaints = _lines(output), _lines(errors)
    answers = [line for line in said if line.startswith("{")]
    if process.returncode or not answers:
        last = "\n".join(complaints[-_LAST_LINES:])
        raise LaunchError(f"`{' '.join(command)}` ended with status {process.returncode}:\n{last}")
    return json.loads(answers[-1])


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks, if it still runs; also after an interrupt of the user."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
