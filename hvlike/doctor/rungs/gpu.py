"""GPUs, their driver, and the torch that would use them."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.gpu import Gpus
from hvlike.doctor.finding import Finding, conclude, fail, skip, warn
from hvlike.doctor.rungs.wording import numbers, of_every_rank

_INSTALL = "Install a torch that was built with CUDA (https://pytorch.org/get-started/locally)."


def judge(case: Case) -> Finding:
    """The GPUs of each rank's node."""
    gpus, software = known(case.me.gpus), known(case.me.software)
    if gpus.driver is None and not gpus.devices:
        built = "" if software.torch_cuda is None else f", though torch was built with CUDA {software.torch_cuda}"
        return skip(f"no NVIDIA driver{built}: tensors stay on the CPU")
    found = [f"driver {gpus.driver or 'unknown'}", *gpus.devices]
    if gpus.visible is not None:
        found.append(f"CUDA_VISIBLE_DEVICES={gpus.visible}")
    remarks = []
    if software.torch_cuda is None:
        return conclude(found, [warn("torch was built for the CPU and does not see the GPUs", _INSTALL)])
    if gpus.wrong is not None:
        remarks.append(fail(f"torch cannot use them: {gpus.wrong}", f"Update the driver, or: {_INSTALL}"))
    if is_driver_too_old(gpus, software.torch_cuda):
        text = f"the driver serves CUDA up to {in_cuda(gpus.driver_cuda or 0)}, torch wants {software.torch_cuda}"
        remarks.append(fail(text, f"Update the driver, or: {_INSTALL}"))
    if not gpus.devices and gpus.wrong is None:
        remarks.append(warn("torch sees no GPU", "Look at CUDA_VISIBLE_DEVICES, and at the container's --gpus."))
    return conclude(found, remarks)


def judge_sharing(case: Case) -> Finding:
    """How many ranks share a GPU."""
    counts = dict(of_every_rank(case, lambda each: each.gpus))
    if not any(each.devices for each in counts.values()):
        return skip("no GPU")
    found, remarks = [], []
    for node in case.nodes:
        host = case.ranks[node[0]].host
        seen = len(counts[node[0]].devices) if node[0] in counts else 0
        found.append(f"{host}: {len(node)} rank(s), {seen} GPU(s) in sight of each")
        if 0 < seen < len(node) and counts[node[0]].visible is None:
            text = f"{host}: {len(node)} ranks share {seen} GPU(s)"
            remarks.append(warn(text, "NCCL serves one rank a GPU: start one rank for each. docs/gpu.md"))
    return conclude(found, remarks)


def is_driver_too_old(gpus: Gpus, torch_cuda: str) -> bool:
    """Whether the driver serves only an older major version of CUDA."""
    return gpus.driver_cuda is not None and gpus.driver_cuda // 1000 < numbers(torch_cuda)[0]


def in_cuda(number: int) -> str:
    """12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"
