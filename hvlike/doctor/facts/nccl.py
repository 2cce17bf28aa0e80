"""NCCL and the CuPy that calls it: what is installed, and what a process then has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvlike.doctor.facts.software import collect as software
from hvlike.doctor.facts.software import cupy_packages, nccl_packages
from hvlike.planes import nccl
from hvlike.planes.nccl import NcclFacts


@dataclass(frozen=True)
class NcclState:
    """NCCL in a process that has loaded torch and CuPy."""

    facts: NcclFacts
    loaded: tuple[str, ...]
    """Every libnccl that is in the memory of the process: more than one are two copies."""
    cupy: tuple[str, ...]
    """The distributions of CuPy, each with its version."""
    packages: tuple[str, ...]
    """The distributions of NCCL, each with its version."""


def collect() -> NcclState:
    """Load CuPy where it is installed: call it in a process that is thrown away. Starts no GPU."""
    facts = nccl.describe()
    installed = software()
    maps = Path("/proc/self/maps")
    return NcclState(
        facts,
        loaded_from(maps.read_text() if maps.exists() else ""),
        tuple(cupy_packages(installed)),
        tuple(nccl_packages(installed)),
    )


def loaded_from(maps: str) -> tuple[str, ...]:
    """The files of libnccl in the text of /proc/self/maps."""
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libnccl.so" in line)
    return tuple(dict.fromkeys(paths))
