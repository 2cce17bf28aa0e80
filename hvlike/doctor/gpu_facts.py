"""GPUs as torch and the driver show them, and NCCL with the CuPy that calls it. Collects only."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hvlike.backends.cuda.nccl import NcclFacts, describe
from hvlike.doctor.software_facts import CUPY, NCCL, collect_software

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpus:
    """What this process can compute on."""

    devices: tuple[str, ...]
    """Name and memory of each that torch can use."""
    driver: str | None
    """The version of the kernel's driver; None: there is none."""
    driver_cuda: int | None
    """The newest CUDA that the driver serves, as 12040; None: unknown."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""
    wrong: str | None
    """What torch says where it cannot use them though it was built to."""
    torch_nccl: str | None
    """The version of NCCL that torch uses, as "2.21.5"."""


def collect_gpus() -> Gpus:
    """Ask the driver and torch, which starts CUDA: call it in a child process."""
    wrong = None
    devices: tuple[str, ...] = ()
    if torch.version.cuda is not None:
        try:
            devices = tuple(map(_describe_gpu, range(torch.cuda.device_count())))
            if devices:
                torch.zeros(1, device="cuda")
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
    return Gpus(
        devices=devices,
        driver=driver_version(_DRIVER),
        driver_cuda=_driver_cuda(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        wrong=wrong,
        torch_nccl=_torch_nccl(),
    )


def _describe_gpu(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def driver_version(file: Path) -> str | None:
    """From a line as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..."."""
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _driver_cuda() -> int | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _torch_nccl() -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


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


def collect_nccl_state() -> NcclState:
    """Load CuPy where it is installed: call it in a child process. Starts no GPU."""
    facts = describe()
    installed = collect_software().installed
    maps = Path("/proc/self/maps")
    return NcclState(
        facts,
        loaded_from(maps.read_text() if maps.exists() else ""),
        tuple(installed(CUPY)),
        tuple(installed(NCCL)),
    )


def loaded_from(maps: str) -> tuple[str, ...]:
    """The files of libnccl in the text of /proc/self/maps."""
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libnccl.so" in line)
    return tuple(dict.fromkeys(paths))
