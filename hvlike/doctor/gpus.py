"""GPUs as torch shows them, NCCL with the CuPy that calls it, and the checks of both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hvlike.backends.cuda.nccl import describe
from hvlike.doctor.finding import Finding, plural
from hvlike.doctor.probe import Skipped, known
from hvlike.transport.host.mpi_library import mapped_files
from hvlike.version import page

if TYPE_CHECKING:
    from hvlike.doctor.job import Case, RankFacts

_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_INSTALL = "Install a torch that was built for the GPUs (https://pytorch.org/get-started/locally)."
_UNUSABLE = f"See {', '.join(_VISIBLE)}, the container's --gpus or --device, and the driver. {_INSTALL}"


@dataclass(frozen=True)
class Gpus:
    has_driver: bool  # The kernel has one, NVIDIA's or AMD's
    devices: tuple[str, ...]  # Name and memory of each that torch can see
    visible: str  # CUDA_VISIBLE_DEVICES=..., or AMD's variables; empty: none is set
    wrong: str  # What torch says where it cannot use them though it was built to; empty: it can


def collect_gpus() -> Gpus:
    """Ask torch, which starts CUDA: call it in a child process."""
    has_driver = any(map(os.path.exists, _DRIVERS))
    devices, wrong = [], ""
    if has_driver and (torch.version.cuda is not None or torch.version.hip is not None):
        try:
            for number in range(torch.cuda.device_count()):
                seen = torch.cuda.get_device_properties(number)
                devices.append(f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB")
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            wrong = str(error).partition("\n")[0]
    visible = " ".join(f"{name}={os.environ[name]}" for name in _VISIBLE if name in os.environ)
    return Gpus(has_driver, tuple(devices), visible, wrong)


@dataclass(frozen=True)
class NcclState:
    """NCCL in a process that has loaded torch and CuPy."""

    version: str  # As "2.27.3"; empty: it cannot be used
    missing: str  # Why it cannot be used and what to do
    loaded: tuple[str, ...]  # Every libnccl or librccl in the memory of the process


def collect_nccl_state() -> NcclState:
    """Load CuPy where it is installed: call it in a child process. Starts no GPU."""
    facts = describe()
    version = f"{facts.version // 10000}.{facts.version // 100 % 100}.{facts.version % 100}" if facts.version else ""
    return NcclState(version, facts.missing, tuple(mapped_files("/libnccl.so", "/librccl.so")))


def check_gpu(case: Case, finding: Finding) -> None:
    firsts = [case.ranks[node[0]] for node in case.nodes]
    if not any(known(facts.gpus).has_driver for facts in firsts):
        built_for = known(case.me.software).torch_gpus
        though = f", though torch was built for {built_for}" if built_for else ""
        raise Skipped(f"no driver of NVIDIA or AMD{though}: tensors stay on the CPU")
    for facts, node in zip(firsts, case.nodes, strict=True):
        _check_host(finding, facts, len(node))


def _check_host(finding: Finding, facts: RankFacts, ranks: int) -> None:
    gpus, host = known(facts.gpus), facts.host
    count = len(gpus.devices)
    finding.note(f"{host}: {plural(ranks, 'rank')}, {plural(count, 'GPU')} in sight of each")
    finding.note(*(f"{host}: {text}" for text in (*gpus.devices, gpus.visible) if text))
    if not known(facts.software).torch_gpus:
        finding.warn(f"{host}: torch was built without CUDA or ROCm and does not see the GPUs", _INSTALL)
    elif gpus.wrong:
        # Where it sees none, they may be hidden on purpose.
        blame = finding.fail if gpus.devices else finding.warn
        blame(f"{host}: torch cannot use the GPUs: {gpus.wrong}", _UNUSABLE)
    elif count < ranks and not gpus.visible:
        advice = f"NCCL serves one rank a GPU: start one rank for each ({page('gpu')})."
        finding.warn(f"{host}: {ranks} ranks share {plural(count, 'GPU')}", advice)


def check_nccl(case: Case, finding: Finding) -> None:
    if not known(case.me.gpus).devices:
        raise Skipped("no GPU: NCCL has nothing to do")
    state = known(case.me.nccl)
    finding.note(f"NCCL {state.version or 'cannot be used'}", *state.loaded)
    if not state.version:
        advice = f"Until then GPU tensors travel through host memory, which is slower ({page('gpu')})."
        finding.warn(state.missing, advice)
    if len(state.loaded) > 1:
        advice = "Leave one, torch's: uninstall the other wheel, or take its folder out of LD_LIBRARY_PATH."
        finding.warn("two copies of NCCL are loaded in one process", advice)
