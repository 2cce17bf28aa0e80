"""The launcher of this job: which one it is, whether it lives, and whether its stderr is a terminal.

The environment tells which launcher started this process and how many ranks it was asked for. When a launcher starts
N processes that the loaded MPI library does not understand, MPI takes each one for a job of size 1: N models are
trained side by side and nobody notices. `check_launcher` turns that into an error.

A launcher killed with -9 cannot end its ranks, and ranks that compute in Python notice nothing. `LauncherWatch`
watches the chain of parents; it looks through shells (`mpirun ./run.sh`).

A rank's own stdout and stderr do not tell whether a person watches (under Open MPI stdout always is a terminal and
stderr never is), so `columns_of_terminal` looks at the stderr of the launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvlike.errors import LaunchError


@dataclass(frozen=True)
class Launcher:
    """A launcher as its environment shows it."""

    name: str
    size: int
    """Number of processes it was asked to start."""
    variable: str
    """The environment variable that said so."""
    rank: int | None = None
    """The number it gave to this process; None where it does not say."""
    fix: str = ""
    """What to do when the loaded MPI library does not understand it."""


@dataclass(frozen=True)
class _Sign:
    """How one launcher is recognised: the variables with size and rank, one that must stand beside them, the fix."""

    name: str
    variable: str
    rank: str
    fix: str
    beside: str | None = None


_SAME_MPI = (
    "Start the job with the mpirun that belongs to the loaded MPI library (`python -m hvlike doctor` shows both)"
)

# The innermost launcher first: mpirun inside a batch step sets its own variables and leaves those of the step.
# SLURM_NTASKS is not a sign, sbatch sets it for a script that no launcher has started.
_SIGNS = (
    _Sign(
        "torchrun",
        "WORLD_SIZE",
        "RANK",
        "torchrun does not start MPI jobs: use `mpirun -n {size} python ...` in its place",
        beside="TORCHELASTIC_RUN_ID",
    ),
    _Sign(
        "horovodrun (Gloo)",
        "HOROVOD_SIZE",
        "HOROVOD_RANK",
        "horovodrun without MPI does not start MPI jobs: use `mpirun -n {size} python ...` in its place",
        beside="HOROVOD_GLOO_RENDEZVOUS_ADDR",
    ),
    _Sign("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", _SAME_MPI),
    _Sign("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", _SAME_MPI),
    _Sign("MPICH's mpiexec (Hydra, Intel MPI, PALS)", "PMI_SIZE", "PMI_RANK", _SAME_MPI),
    _Sign(
        "LSF's jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "Load the MPI library that jsrun serves (IBM Spectrum MPI), or use mpirun",
    ),
    _Sign(
        "Flux",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_RANK",
        "Choose the interface that the library speaks: `flux run -o mpi=...` or `-o pmi=pmix`, or use mpirun",
    ),
    _Sign(
        "Slurm's srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "Choose the interface that the library speaks: `srun --mpi=pmix` for Open MPI (4 or newer), `srun --mpi=pmi2` "
        "for MPICH and Intel MPI (`srun --mpi=list` shows what the site offers), or use mpirun inside the allocation",
    ),
)


def detect_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that `environment` shows, or None for a process started by hand."""
    sign = _find_sign(environment)
    if sign is None:
        return None
    size, rank = int(environment[sign.variable]), environment.get(sign.rank, "")
    number = int(rank) if rank.isdecimal() else None
    return Launcher(sign.name, size, sign.variable, number, sign.fix.format(size=size))


def check_launcher(environment: Mapping[str, str], mpi_size: int, library: str) -> None:
    """Raise LaunchError when the launcher was asked for several processes and MPI sees only this one.

    mpi_size: size of MPI_COMM_WORLD. library: what the loaded MPI library calls itself, for the message.
    """
    sign = _find_sign(environment)
    if sign is None or mpi_size > 1:
        return
    size = int(environment[sign.variable])
    if size <= 1:
        return
    raise LaunchError(
        f"{sign.name} started {size} processes ({sign.variable}={size}), but MPI sees a job of one process here: "
        f"each of the {size} would train its own model. The loaded MPI library is: {library}. It does not understand "
        f"this launcher. {sign.fix.format(size=size)}. To run this process alone on purpose, unset {sign.variable}."
    )


def lone_child(environment: Mapping[str, str], size: int) -> str:
    """What has to be said of a job of one rank in a child of multiprocessing, which no launcher has started; else "".

    size: that of the job.
    """
    if size > 1 or multiprocessing.parent_process() is None or _find_sign(environment) is not None:
        return ""
    return (
        "init() was called in a child process that multiprocessing or torch.multiprocessing.spawn has started, without "
        "a launcher: this is a job of one rank, and each such child trains a model of its own. For N ranks start the "
        "program by `mpirun -n N python ...`, or the function by hvd.run(function, np=N)."
    )


def _find_sign(environment: Mapping[str, str]) -> _Sign | None:
    for sign in _SIGNS:
        beside = sign.beside is None or sign.beside in environment
        if beside and environment.get(sign.variable, "").isdecimal():
            return sign
    return None


_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "csh", "tcsh", "fish", "busybox"})


@dataclass(frozen=True)
class _ParentProcess:
    name: str
    parent: int


class LauncherWatch:
    """Remembers the chain of parents up to the first that is no shell, and notices when it breaks."""

    def __init__(
        self, parent: Callable[[], int] = os.getppid, look: Callable[[int], _ParentProcess | None] | None = None
    ) -> None:
        """parent: gives this process's parent now; look: what a process is (default: ask /proc)."""
        self._parent = parent
        self._look = look or _read_process
        self._chain = self._climb()

    @property
    def launcher(self) -> int:
        """The process id of the first parent that is no shell."""
        return self._chain[-1]

    def is_orphan(self) -> bool:
        """Whether the launcher is gone. Costs some microseconds."""
        if self._parent() != self._chain[0]:
            return True
        # Without shells in between the first parent is all there is to look at.
        return len(self._chain) > 1 and self._climb()[: len(self._chain)] != self._chain

    def _climb(self) -> tuple[int, ...]:
        """Process ids from the parent upwards; all but the last are shells."""
        chain = [self._parent()]
        while (process := self._look(chain[-1])) is not None and process.name in _SHELLS and process.parent > 0:
            chain.append(process.parent)
        return tuple(chain)


def _read_process(pid: int) -> _ParentProcess | None:
    """Name and parent of a process; None where there is no /proc, or the process is gone."""
    try:
        return _parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None


def _parse_stat(stat: str) -> _ParentProcess:
    """Read "pid (name) state parent ...", where the name may itself hold blanks and parentheses."""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return _ParentProcess(name, int(rest.split()[1]))


_LAUNCHERS = frozenset(
    {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr"}
)
_MOST_PARENTS = 8
_WIDTH = 80


def columns_of_terminal(stderr_of: Callable[[], str | None] | None = None) -> int | None:
    """How wide the terminal is that shows this rank's stderr; None where there is none. Local.

    stderr_of: gives the file that the launcher's stderr is (default: looked up in /proc).
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        return None
    if stream.isatty():
        return _columns(stream.fileno())
    path = (stderr_of or _launchers_stderr)()
    if path is None or not path.startswith(("/dev/pts/", "/dev/tty")):
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _columns(descriptor) if os.isatty(descriptor) else None
    finally:
        os.close(descriptor)


def _columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or _WIDTH
    except OSError:
        return _WIDTH


def _launchers_stderr() -> str | None:
    """The file that the stderr of the launcher is; of several in a row (mpirun and its helper) the outermost."""
    process, found = os.getppid(), None
    for _ in range(_MOST_PARENTS):
        try:
            stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
            if stat.partition("(")[2].rpartition(")")[0] not in _LAUNCHERS:
                break
            found = os.readlink(f"/proc/{process}/fd/2")
        except OSError:
            # It has ended, or belongs to somebody else, as the helper of a batch system does.
            break
        process = int(stat.rpartition(")")[2].split()[1])
    return found
