"""Benchmarks that start jobs of their own: run a module of hvlike on some ranks, read its answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hvlike.errors import LaunchError, UsageError
from hvlike.transport import launchers, library, starters
from hvlike.transport.starters import Starter

_GRACE_SECONDS = 10
_LAST_LINES = 60


def refuse_inside_a_job(environment: Mapping[str, str], benchmark: str) -> None:
    """Raise UsageError when this process is a rank already."""
    launcher = launchers.detect(environment)
    if launcher is not None:
        raise UsageError(
            f"bench {benchmark} starts its jobs itself, and this process is a rank of a job of {launcher.name} "
            f"({launcher.variable}={launcher.size}): run `python -m hvlike bench {benchmark}` without mpirun."
        )


def find() -> Starter:
    """The launcher of the MPI library that is loaded here. Raises: LaunchError when there is none."""
    return starters.find(library.ask(os.environ), os.environ)


def module_command(starter: Starter, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs a module on so many ranks."""
    return starter.command(ranks, [sys.executable, "-m", module, *arguments])


def run_job(
    starter: Starter, ranks: int, module: str, arguments: Sequence[str], knobs: Mapping[str, str], seconds: float
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
