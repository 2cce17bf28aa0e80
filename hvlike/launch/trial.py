"""The launchers of this machine, and a trial of one: two ranks, which say how many MPI counts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from hvlike.errors import LaunchError
from hvlike.launch.attempt import Attempt
from hvlike.transport.host.find_mpirun import COUNT_RANKS, MpiLibrary, Mpirun, examine_launcher, find_mpirun

_RANKS = 2
_SHOWN = 6


@dataclass(frozen=True)
class Launchers:
    on_path: Mpirun | None  # What mpirun is when it is called by name, or mpiexec
    belonging: Mpirun | None  # One that belongs to the loaded library, wherever it lies; in an allocation also srun

    @property
    def tried(self) -> Mpirun | None:
        """What two ranks are tried with: what is called by name, if there is such a one."""
        mine, right = self.on_path, self.belonging
        return right if mine is None or (right is not None and right.path == mine.path) else mine


def collect_launchers(library: MpiLibrary, environment: Mapping[str, str]) -> Launchers:
    """Look along PATH, and beside the library. Local; starts each launcher with --version. Raises: LaunchError."""
    path = next(
        filter(None, (shutil.which(name, path=environment.get("PATH")) for name in ("mpirun", "mpiexec"))), None
    )
    try:
        belonging = find_mpirun(library, environment)
    except LaunchError:
        belonging = None
    return Launchers(None if path is None else examine_launcher(path), belonging)


@dataclass(frozen=True)
class Trial:
    command: str
    status: int | None  # Its exit status; None: it was stopped
    sizes: tuple[int, ...]  # How many ranks MPI counted, as each of them says
    lines: tuple[str, ...]  # Its last lines


def try_ranks(mpirun: Mpirun, seconds: float) -> Trial:
    """Start two ranks, which say how many MPI counts; stopped after so many seconds. Outside of jobs only; blocks."""
    command = mpirun.command(_RANKS, [sys.executable, "-c", COUNT_RANKS])
    status = None
    # A file, not a pipe: a rank that outlives its launcher would keep that open and block the reader.
    with tempfile.TemporaryFile("w+") as printed:
        with Attempt(command, os.environ, [], stdout=printed, stderr=printed) as attempt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = attempt.wait(seconds)
        printed.seek(0)
        text = printed.read()
    sizes = tuple(map(int, re.findall(r"^ranks: (\d+)$", text, re.MULTILINE)))
    lines = [line for line in text.splitlines() if line.strip(" -=*")]
    return Trial(" ".join([*mpirun.command(_RANKS, ["python"]), "..."]), status, sizes, tuple(lines[-_SHOWN:]))
