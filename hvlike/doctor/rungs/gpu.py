"""GPUs, their driver, and the torch that would use them."""

from __future__ import annotations

from dataclasses import replace

from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.gpu import Gpus
from hvlike.doctor.finding import Finding, Remark, conclude, fail, skip, warn
from hvlike.doctor.rungs.wording import numbers, of_every_rank

_INSTALL = "Install a torch that was built with CUDA (https://pytorch.org/get-started/locally)."


def judge(case: Case) -> Finding:
    """The driver and the GPUs of every node, as its first rank sees them."""
    firsts = [case.ranks[node[0]] for node in case.nodes]
    seen = [(each.host, known(each.gpus), known(each.software)) for each in firsts]
    if all(gpus.driver is None and not gpus.devices for _, gpus, _ in seen):
        built = seen[0][2].torch_cuda
        built_with = "" if built is None else f", though torch was built with CUDA {built}"
        return skip(f"no NVIDIA driver{built_with}: tensors stay on the CPU")
    found, remarks = [], []
    for host, gpus, software in seen:
        where = f"{host}: " if len(seen) > 1 else ""
        found += [f"{where}driver {gpus.driver or 'unknown'}", *(where + device for device in gpus.devices)]
        if gpus.visible is not None:
            found.append(f"{where}CUDA_VISIBLE_DEVICES={gpus.visible}")
        remarks += [replace(each, text=where + each.text) for each in _judge(gpus, software.torch_cuda)]
    return conclude(found, remarks)


def _judge(gpus: Gpus, torch_cuda: str | None) -> list[Remark]:
    if torch_cuda is None:
        return [warn("torch was built for the CPU and does not see the GPUs", _INSTALL)]
    remarks = []
    if gpus.wrong is not None:
        remarks.append(fail(f"torch cannot use them: {gpus.wrong}", f"Update the driver, or: {_INSTALL}"))
    if is_driver_too_old(gpus, torch_cuda):
        text = f"the driver serves CUDA up to {in_cuda(gpus.driver_cuda or 0)}, torch wants {torch_cuda}"
        remarks.append(fail(text, f"Update the driver, or: {_INSTALL}"))
    if not gpus.devices and gpus.wrong is None:
        remarks.append(warn("torch sees no GPU", "Look at CUDA_VISIBLE_DEVICES, and at the container's --gpus."))
    return remarks


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
