"""GPUs as torch and the driver show them, NCCL with the CuPy that calls it, and the checks of all these."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvlike.backends.cuda.nccl import NcclFacts, describe
from hvlike.doctor.finding import Finding, Skipped, nccl_version, numbers, of_every_rank, plural
from hvlike.doctor.probe import known
from hvlike.doctor.software import CUPY, NCCL
from hvlike.transport.host.mpi_library import mapped_files
from hvlike.version import page

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_INSTALL = "Install a torch that was built for the GPUs (https://pytorch.org/get-started/locally)."
_UPDATE = f"Update the driver, or: {_INSTALL}"


@dataclass(frozen=True)
class Gpus:
    devices: tuple[str, ...]  # Name and memory of each that torch can use
    driver: str | None  # The version of the kernel's driver, NVIDIA's or AMD's; None: there is none
    driver_cuda: int | None  # The newest CUDA that the driver serves, as 12040; None: unknown
    visible: str | None  # CUDA_VISIBLE_DEVICES=..., or AMD's variables; None: none is set
    wrong: str | None  # What torch says where it cannot use them though it was built to


def collect_gpus() -> Gpus:
    """Ask the driver and torch, which starts CUDA: call it in a child process."""
    wrong = None
    devices: tuple[str, ...] = ()
    if torch.version.cuda is not None or torch.version.hip is not None:
        try:
            found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            devices = tuple(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in found)
            if devices:
                torch.zeros(1, device="cuda")
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
    driver = next((version for each in _DRIVERS if (version := driver_version(each)) is not None), None)
    visible = " ".join(f"{name}={os.environ[name]}" for name in _VISIBLE if name in os.environ)
    return Gpus(devices, driver, _driver_cuda(), visible or None, wrong)


def driver_version(file: Path) -> str | None:
    """From a line as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...", or AMD's "6.12.12"."""
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


@dataclass(frozen=True)
class NcclState:
    """NCCL in a process that has loaded torch and CuPy."""

    facts: NcclFacts
    loaded: tuple[
        str, ...
    ]  # Every libnccl or librccl that is in the memory of the process: more than one are two copies


def collect_nccl_state() -> NcclState:
    """Load CuPy where it is installed: call it in a child process. Starts no GPU."""
    return NcclState(describe(), tuple(mapped_files("/libnccl.so", "/librccl.so")))


def check_gpu(case: Case, finding: Finding) -> None:
    firsts = [case.ranks[node[0]] for node in case.nodes]
    seen = [(each.host, known(each.gpus), known(each.software)) for each in firsts]
    if all(gpus.driver is None and not gpus.devices for _, gpus, _ in seen):
        built_for = seen[0][2].torch_gpus
        though = f", though torch was built for {built_for}" if built_for else ""
        raise Skipped(f"no driver of NVIDIA or AMD{though}: tensors stay on the CPU")
    for host, gpus, software in seen:
        where = f"{host}: " if len(seen) > 1 else ""
        finding.note(f"{where}driver {gpus.driver or 'unknown'}", *(where + device for device in gpus.devices))
        if gpus.visible is not None:
            finding.note(f"{where}{gpus.visible}")
        if not software.torch_gpus:
            finding.warn(f"{where}torch was built for the CPU and does not see the GPUs", _INSTALL)
            continue
        if gpus.wrong is not None:
            finding.fail(f"{where}torch cannot use them: {gpus.wrong}", _UPDATE)
        elif not gpus.devices:
            advice = f"Look at {', '.join(_VISIBLE)}, and at the container's --gpus or --device."
            finding.warn(f"{where}torch sees no GPU", advice)
        # A driver serves all versions of CUDA up to its own, and newer ones of the same major version.
        wanted = software.torch_cuda
        if wanted and gpus.driver_cuda is not None and gpus.driver_cuda // 1000 < numbers(wanted)[0]:
            text = f"{where}the driver serves CUDA up to {in_cuda(gpus.driver_cuda)}, torch wants {wanted}"
            finding.fail(text, _UPDATE)


def check_gpu_sharing(case: Case, finding: Finding) -> None:
    counts = dict(of_every_rank(case, lambda each: each.gpus))
    if not any(each.devices for each in counts.values()):
        raise Skipped("no GPU")
    for node in case.nodes:
        host = case.host(node)
        seen = len(counts[node[0]].devices) if node[0] in counts else 0
        finding.note(f"{host}: {plural(len(node), 'rank')}, {plural(seen, 'GPU')} in sight of each")
        if 0 < seen < len(node) and counts[node[0]].visible is None:
            text = f"{host}: {len(node)} ranks share {plural(seen, 'GPU')}"
            finding.warn(text, f"NCCL serves one rank a GPU: start one rank for each ({page('gpu')}).")


def in_cuda(number: int) -> str:
    """Return 12.4 for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def check_nccl(case: Case, finding: Finding) -> None:
    state, gpus = known(case.me.nccl), known(case.me.gpus)
    facts, installed = state.facts, known(case.me.software).installed
    cupy, wheels = installed(CUPY), installed(NCCL)
    finding.note(*(cupy or ("no CuPy",)))
    if facts.version:
        finding.note(f"NCCL {nccl_version(facts.version)} through CuPy")
    if facts.torch_version:
        finding.note(f"NCCL {nccl_version(facts.torch_version)} of torch")
    finding.note(*state.loaded)
    if not gpus.devices:
        raise Skipped("no GPU: NCCL has nothing to do", *(finding.found if cupy else ()))
    if len(cupy) > 1:
        advice = (
            "Uninstall all of them, then install the one of your torch: `pip install hvlike[cuda12]`, [cuda13], [rocm]."
        )
        finding.fail("several distributions of CuPy overwrite each other's files", advice)
    if not facts.version:
        advice = f"Until then CUDA tensors travel through host memory, which is slower ({page('gpu')})."
        finding.warn(f"NCCL cannot be used: {facts.missing}", advice)
    if len(state.loaded) > 1:
        advice = "Leave one, torch's: uninstall the other wheel, or take its folder out of LD_LIBRARY_PATH."
        finding.warn("two copies of NCCL are loaded in one process", advice)
    if facts.version and facts.torch_version and facts.version != facts.torch_version:
        versions = nccl_version(facts.version), nccl_version(facts.torch_version)
        advice = "Make them one: `pip install --force-reinstall` the nvidia-nccl wheel of torch."
        finding.warn(f"CuPy calls NCCL {versions[0]}, torch was built with {versions[1]}", advice)
    if len(wheels) > 1:
        advice = "Uninstall the wheel that is not of torch's CUDA."
        finding.warn(f"several wheels of NCCL: {', '.join(wheels)}", advice)
