"""Which launcher started this process and how many processes it was asked for, read from the environment.

When a launcher starts N processes that the loaded MPI library does not understand, MPI takes each one for a job of
size 1: N models are trained side by side and nobody notices. `check_launcher` turns that into an error. The launchers
themselves are in `launcher_table.py`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hvlike.errors import LaunchError
from hvlike.transport.host.launcher_table import LAUNCHERS, LauncherKind
from hvlike.transport.host.parents import environment_of, read_process


class Launcher(NamedTuple):
    """A launcher as its environment shows it."""

    name: str
    size: int
    variable: str
    rank: int | None = None
    fix: str = ""  # What to do when the loaded MPI library does not understand it
    family: str = ""  # As in `launcher_table`; empty: it starts no MPI jobs, or is not known
    at_least: bool = False  # Whether there may be more processes than `size`, as it does not tell their number

    @property
    def asked(self) -> str:
        """How many processes it was asked for, in words."""
        value = self.rank if self.at_least else self.size
        return f"{'at least ' * self.at_least}{self.size} processes ({self.variable}={value})"


def detect_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that `environment` shows, or None for a process started by hand."""
    found = [(kind, launcher) for kind in LAUNCHERS if (launcher := _read(kind, environment)) is not None]
    for place, (kind, launcher) in enumerate(found):
        # A batch system that speaks PMI sets the variables of MPICH's launcher beside its own.
        outer = [each for _, each in found[place + 1 :]]
        borrowed = bool(kind.proof) and kind.proof not in environment
        if not borrowed or not any(_are_same(launcher, each) for each in outer):
            return launcher
    return None


def _read(kind: LauncherKind, environment: Mapping[str, str]) -> Launcher | None:
    if kind.beside and kind.beside not in environment:
        return None
    rank, size = _number(environment, kind.rank), _number(environment, kind.size)
    at_least, variable = False, kind.size
    if not kind.tells_size:
        if rank is None:
            return None
        if size is None or _number(environment, "PMI_RANK") != rank:
            at_least, variable = True, kind.rank
            size = max(rank + 1, _number(environment, kind.local_size) or 1)
    if size is None:
        return None
    return Launcher(kind.name, size, variable, rank, kind.fix.format(name=kind.name, size=size), kind.family, at_least)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _are_same(one: Launcher, other: Launcher) -> bool:
    return one.rank == other.rank and (one.size == other.size or other.at_least)


def rank_told(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher of MPI jobs has given this process. MPI need not run."""
    found = (_number(environment, kind.rank) for kind in LAUNCHERS if kind.starts_mpi)
    return next((rank for rank in found if rank is not None), None)


def local_rank(environment: Mapping[str, str]) -> str | None:
    """The number of this rank on its node, where the launcher tells it."""
    names = (name for kind in LAUNCHERS if kind.starts_mpi for name in kind.local_rank)
    return next((environment[name] for name in names if name in environment), None)


def check_launcher(environment: Mapping[str, str], mpi_size: int, library: str) -> None:
    """Raise LaunchError where the launcher was asked for several processes and MPI sees only this one."""
    launcher = detect_launcher(environment)
    if launcher is None or mpi_size > 1 or launcher.size <= 1:
        return
    raise LaunchError(
        f"{launcher.name} started {launcher.asked}, but MPI sees a job of one process here: each of the "
        f"{launcher.size} would train its own model. The loaded MPI library is: {library}. It does not understand this "
        f"launcher. {launcher.fix}. To run this process alone on purpose, unset {launcher.variable}."
    )


class Hidden(NamedTuple):
    """A launcher whose variables do not reach this process."""

    name: str
    asked: str  # What it has started, in words
    wrapper: str  # The name of the process at which they end


def hidden_launcher(environment: Mapping[str, str], above: Callable[[], Iterator[int]] | None = None) -> Hidden | None:
    """The launcher that has started this process, by those above it, and whose variables this one does not have: what
    stands between (a container, `env -i`, sudo) has dropped them. above: the processes above this one, the next first.
    """
    if detect_launcher(environment) is not None:
        return None
    below = environment
    for process in (above or processes_above)():
        known = read_process(process)
        name = "" if known is None else known.name
        shown = environment_of(process)
        launcher = detect_launcher(shown)
        if launcher is not None:
            return Hidden(launcher.name, launcher.asked, name) if launcher.size > 1 else None
        # A wrapper that makes way for the rank leaves no process with the variables, only the launcher's own.
        kind = next((each for each in LAUNCHERS if name in each.parents), None)
        if kind is not None and not {kind.rank, kind.size, *kind.identity} & set(below):
            return Hidden(kind.name, "this process", name)
        below = shown
    return None


def processes_above() -> Iterator[int]:
    """The processes above this one, as far as they can be seen."""
    process = os.getppid()
    while process > 1:
        yield process
        known = read_process(process)
        process = 0 if known is None else known.parent


def lone_child_warning(environment: Mapping[str, str], size: int) -> str:
    """The warning for a job of one rank that no launcher has started, it seems, though it is one of several processes:
    children of multiprocessing, or ranks in containers that hide their launcher; else "".
    """
    if size > 1 or detect_launcher(environment) is not None:
        return ""
    if multiprocessing.parent_process() is not None:
        return (
            "init() was called in a child process that multiprocessing or torch.multiprocessing.spawn has started, "
            "without a launcher: this is a job of one rank, and each such child trains a model of its own. For N ranks "
            "start the program by `mpirun -n N python ...`, or the function by hvd.run(function, np=N)."
        )
    hidden = hidden_launcher(environment)
    if hidden is None:
        return ""
    return (
        f"{hidden.name} started {hidden.asked}, but its variables end at the process {hidden.wrapper!r} above this "
        "one: this is a job of one rank, and each such process trains a model of its own. Let the variables pass (a "
        "container without --cleanenv, no `env -i`, `sudo -E`)."
    )
