"""Which launcher started this process and how many processes it was asked for, read from the environment.

When a launcher starts N processes that the loaded MPI library does not understand, MPI takes each one for a job of
size 1: N models are trained side by side and nobody notices. `check_launcher` turns that into an error.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import NamedTuple

from hvlike.errors import LaunchError


class Launcher(NamedTuple):
    """A launcher as its environment shows it."""

    name: str
    size: int
    variable: str
    rank: int | None = None
    fix: str = ""  # What to do when the loaded MPI library does not understand it


_SAME_MPI = "Start the job by the mpirun that belongs to the loaded MPI library (`python -m hvlike doctor` shows both)"
_NO_MPI = "{name} does not start MPI jobs: use `mpirun -n {size} python ...` in its place"
_INTERFACE = "Choose the interface that the library speaks: "

# Name, the variables with size and rank, a variable that must stand beside them, the fix. The innermost launcher comes
# first: mpirun inside a batch step sets its own variables and leaves those of the step. SLURM_NTASKS is no sign: sbatch
# sets it for a script that no launcher has started.
SIGNS = (
    ("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", _NO_MPI),
    ("horovodrun without MPI (Gloo)", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", _NO_MPI),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", None, _SAME_MPI),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", None, _SAME_MPI),
    ("MPICH's mpiexec (Hydra, Intel MPI, PALS)", "PMI_SIZE", "PMI_RANK", None, _SAME_MPI),
    (
        "LSF's jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        None,
        "Load the MPI library that jsrun serves (IBM Spectrum MPI), or use mpirun",
    ),
    (
        "Flux",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_RANK",
        None,
        _INTERFACE + "`flux run -o mpi=...` or `-o pmi=pmix`, or use mpirun",
    ),
    (
        "Slurm's srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        None,
        _INTERFACE + "`srun --mpi=pmix` for Open MPI (4 or newer), `srun --mpi=pmi2` for MPICH and Intel MPI (`srun "
        "--mpi=list` shows what the site offers), or use mpirun inside the allocation",
    ),
)


def detect_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that `environment` shows, or None for a process started by hand."""
    for name, variable, rank_variable, beside, fix in SIGNS:
        number = environment.get(variable, "")
        if variable == "PMI_SIZE" and _is_pmi2_of_slurm(environment):
            continue
        if number.isdecimal() and (beside is None or beside in environment):
            rank = environment.get(rank_variable, "")
            fix = fix.format(name=name, size=number)
            return Launcher(name, int(number), variable, int(rank) if rank.isdecimal() else None, fix)
    return None


def _is_pmi2_of_slurm(environment: Mapping[str, str]) -> bool:
    """Whether `srun --mpi=pmi2` has set PMI_SIZE. Hydra in a step of Slurm sets it, too, but numbers local ranks."""
    pairs = (("PMI_SIZE", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "SLURM_PROCID"))
    return "MPI_LOCALNRANKS" not in environment and all(environment.get(a, "") == environment.get(b) for a, b in pairs)


# Where a rank stands on its node. Slurm's come last: mpirun inside a batch step leaves those of the step.
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)


def local_rank(environment: Mapping[str, str]) -> str | None:
    """The number of this rank on its node, where the launcher tells it."""
    return next((environment[name] for name in _LOCAL_RANKS if name in environment), None)


def check_launcher(environment: Mapping[str, str], mpi_size: int, library: str) -> None:
    """Raise LaunchError where the launcher was asked for several processes and MPI sees only this one."""
    launcher = detect_launcher(environment)
    if launcher is None or mpi_size > 1 or launcher.size <= 1:
        return
    raise LaunchError(
        f"{launcher.name} started {launcher.size} processes ({launcher.variable}={launcher.size}), but MPI sees a job "
        f"of one process here: each of the {launcher.size} would train its own model. The loaded MPI library is: "
        f"{library}. It does not understand this launcher. {launcher.fix}. To run this process alone on purpose, unset "
        f"{launcher.variable}."
    )


def lone_child_warning(environment: Mapping[str, str], size: int) -> str:
    """The warning for a job of one rank in a child of multiprocessing, which no launcher has started; else ""."""
    if size > 1 or multiprocessing.parent_process() is None or detect_launcher(environment) is not None:
        return ""
    return (
        "init() was called in a child process that multiprocessing or torch.multiprocessing.spawn has started, without "
        "a launcher: this is a job of one rank, and each such child trains a model of its own. For N ranks start the "
        "program by `mpirun -n N python ...`, or the function by hvd.run(function, np=N)."
    )
