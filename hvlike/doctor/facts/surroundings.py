"""What the environment says of launcher, batch system and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvlike import config
from hvlike.errors import UsageError
from hvlike.transport import launchers
from hvlike.transport.launchers import Launcher

_BATCH_SYSTEMS = (
    ("Slurm", "SLURM_JOB_ID"),
    ("PBS", "PBS_JOBID"),
    ("LSF", "LSB_JOBID"),
    ("Flux", "FLUX_JOB_ID"),
    ("Grid Engine", "SGE_TASK_ID"),
)
_INTERFACES = (
    ("PMIx", "PMIX_NAMESPACE"),
    ("PMI-1 or PMI-2 (Hydra)", "PMI_FD"),
    ("PMI-1 or PMI-2 (Hydra)", "PMI_PORT"),
    ("PALS", "PALS_APID"),
    ("JSM", "JSM_NAMESPACE_ID"),
)
_RC = "MPI4PY_RC_"


@dataclass(frozen=True)
class Surroundings:
    """The environment of a process, as far as it decides how a job starts."""

    launcher: Launcher | None
    batch: str | None
    """The batch system and its job, as "Slurm job 17"; None outside of one."""
    interfaces: tuple[str, ...]
    """By which the launcher offers to tell the ranks of each other."""
    omp_threads: str | None
    """OMP_NUM_THREADS as it is set."""
    mpi4py: tuple[str, ...]
    """Settings of mpi4py, as NAME=value."""
    wrong_knob: str | None
    """Why init() would refuse the knobs; None: it would not."""
    ignored_knobs: tuple[tuple[str, str], ...]
    """Variables of Horovod that are set and mean nothing here, with the reason."""


def collect(environment: Mapping[str, str]) -> Surroundings:
    """Read the environment. Local."""
    batch = next((f"{name} job {environment[key]}" for name, key in _BATCH_SYSTEMS if environment.get(key)), None)
    wrong = None
    try:
        config.read_knobs(environment)
    except UsageError as error:
        wrong = str(error)
    return Surroundings(
        launcher=launchers.detect(environment),
        batch=batch,
        interfaces=tuple(dict.fromkeys(name for name, key in _INTERFACES if key in environment)),
        omp_threads=environment.get("OMP_NUM_THREADS") or None,
        mpi4py=tuple(f"{key}={value}" for key, value in sorted(environment.items()) if _concerns_mpi4py(key)),
        wrong_knob=wrong,
        ignored_knobs=tuple((key, reason) for key, reason in config.IGNORED.items() if environment.get(key)),
    )


def _concerns_mpi4py(key: str) -> bool:
    return key.startswith(_RC) or key == "MPI4PY_LIBMPI"
