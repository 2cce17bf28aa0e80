"""The launchers that a user would call, and what comes of a job of two ranks that is started with one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvlike import transport
from hvlike.errors import LaunchError
from hvlike.transport import starters
from hvlike.transport.library import Library
from hvlike.transport.starters import Starter

_NAMES = ("mpirun", "mpiexec")
_PROGRAM = Path(transport.__file__).parent / "say_size.py"
_RANKS = 2
_DYING_SECONDS = 3.0
_SHOWN = 3


@dataclass(frozen=True)
class Programs:
    """Launchers of this machine."""

    on_path: tuple[Starter, ...]
    """What mpirun and mpiexec are when they are called by name."""
    silent: tuple[str, ...]
    """Those of them that did not say what they are, and why."""
    belonging: Starter | None
    """One that belongs to the loaded library, wherever it lies; None: none was found."""
    srun: str | None
    """Where srun lies."""


@dataclass(frozen=True)
class Trial:
    """A job of two ranks that was started."""

    command: str
    status: int | None
    """Its exit status; None: it was stopped."""
    sizes: tuple[int, ...]
    """How many ranks MPI counted, as each of them says."""
    said: tuple[str, ...]
    """Its first and last lines."""


def collect(library: Library | None, environment: Mapping[str, str]) -> Programs:
    """Look along PATH, and beside the library if there is one. Local; starts each launcher with --version."""
    found, silent = [], []
    for name in _NAMES:
        path = shutil.which(name, path=environment.get("PATH"))
        if path is None:
            continue
        try:
            found.append(starters.examine(path))
        except LaunchError as error:
            silent.append(str(error))
    try:
        belonging = None if library is None else starters.find(library, environment)
    except LaunchError:
        belonging = None
    return Programs(tuple(found), tuple(silent), belonging, shutil.which("srun", path=environment.get("PATH")))


def try_out(starter: Starter, seconds: float) -> Trial:
    """Start two ranks that print what MPI counts; stopped after so many seconds. Blocks.

    Call it outside of jobs only.
    """
    command = starter.command(_RANKS, [sys.executable, "-c", _PROGRAM.read_text()])
    shown = " ".join([*starter.command(_RANKS, ["python"]), "..."])
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    status: int | None = None
    try:
        text, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        text = _stop(process)
    lines = [line for line in text.splitlines() if line.strip(" -=*")]
    sizes = [int(line.split()[1]) for line in lines if line.startswith("ranks: ") and line.split()[1].isdigit()]
    # The first ones often say why, the last ones what came of it.
    said = lines if len(lines) <= 2 * _SHOWN else [*lines[:_SHOWN], "...", *lines[-_SHOWN:]]
    return Trial(shown, status, tuple(sizes), tuple(said))


def _stop(process: subprocess.Popen[str]) -> str:
    """End the launcher, which ends its ranks; returns what was printed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_DYING_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
