"""Which launcher started this process and how many processes it was asked for, read from the environment.

When a launcher starts N processes with which the loaded MPI library cannot talk, MPI takes each of them for a job
of size 1: N models are trained side by side and nobody notices. `check` turns that into an error.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass

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


def detect(environment: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that `environment` shows, or None for a process started by hand."""
    sign = _find(environment)
    if sign is None:
        return None
    size, rank = int(environment[sign.variable]), environment.get(sign.rank, "")
    number = int(rank) if rank.isdecimal() else None
    return Launcher(sign.name, size, sign.variable, number, sign.fix.format(size=size))


def check(environment: Mapping[str, str], mpi_size: int, library: str) -> None:
    """Raise LaunchError when the launcher was asked for several processes and MPI sees only this one.

    mpi_size: size of MPI_COMM_WORLD. library: what the loaded MPI library calls itself, for the message.
    """
    sign = _find(environment)
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
    if size > 1 or multiprocessing.parent_process() is None or _find(environment) is not None:
        return ""
    return (
        "init() was called in a child process that multiprocessing or torch.multiprocessing.spawn has started, without "
        "a launcher: this is a job of one rank, and each such child trains a model of its own. For N ranks start the "
        "program by `mpirun -n N python ...`, or the function by hvd.run(function, np=N)."
    )


def _find(environment: Mapping[str, str]) -> _Sign | None:
    for sign in _SIGNS:
        beside = sign.beside is None or sign.beside in environment
        if beside and environment.get(sign.variable, "").isdecimal():
            return sign
    return None
