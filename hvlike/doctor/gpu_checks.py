"""Checks of GPUs, their driver, NCCL, and MPI with memory of a GPU."""

from __future__ import annotations

from dataclasses import replace

from hvlike.doctor.finding import Finding, Remark, conclude, fail, nccl_version, numbers, of_every_rank, skip, warn
from hvlike.doctor.gpu_facts import Gpus
from hvlike.doctor.job import Case, known

_INSTALL = "Install a torch that was built with CUDA (https://pytorch.org/get-started/locally)."


def judge_gpu(case: Case) -> Finding:
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
        remarks += [replace(each, text=where + each.text) for each in _judge_driver(gpus, software.torch_cuda)]
    return conclude(found, remarks)


def _judge_driver(gpus: Gpus, torch_cuda: str | None) -> list[Remark]:
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


def judge_gpu_sharing(case: Case) -> Finding:
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


def judge_nccl(case: Case) -> Finding:
    """CuPy and NCCL where there are GPUs."""
    state, gpus = known(case.me.nccl), known(case.me.gpus)
    facts = state.facts
    found = [*(state.cupy or ("no CuPy",)), f"NCCL {nccl_version(facts.version)} through CuPy" if facts.version else ""]
    if facts.torch_version:
        found.append(f"NCCL {nccl_version(facts.torch_version)} of torch")
    found += state.loaded
    if not gpus.devices:
        return skip("no GPU: NCCL has nothing to do", *(each for each in found if each and state.cupy))
    remarks = []
    if len(state.cupy) > 1:
        advice = "Uninstall all of them, then install the one of your CUDA: `pip install hvlike[cuda12]` or [cuda13]."
        remarks.append(fail("several distributions of CuPy overwrite each other's files", advice))
    if not facts.version:
        text = f"NCCL cannot be used: {facts.missing}"
        advice = "Until then CUDA tensors travel through host memory, which is slower. docs/gpu.md"
        remarks.append(warn(text, advice))
    if len(state.loaded) > 1:
        advice = "Leave one, torch's: uninstall the other wheel, or take its folder out of LD_LIBRARY_PATH."
        remarks.append(warn("two copies of NCCL are loaded in one process", advice))
    if facts.version and facts.torch_version and facts.version != facts.torch_version:
        text = (
            f"CuPy calls NCCL {nccl_version(facts.version)}, torch was built with {nccl_version(facts.torch_version)}"
        )
        remarks.append(warn(text, "Make them one: `pip install --force-reinstall` the nvidia-nccl wheel of torch."))
    if len(state.packages) > 1:
        advice = "Uninstall the wheel that is not of torch's CUDA."
        remarks.append(warn(f"several wheels of NCCL: {', '.join(state.packages)}", advice))
    return conclude([each for each in found if each], remarks)
