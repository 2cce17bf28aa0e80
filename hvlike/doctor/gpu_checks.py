"""Checks of GPUs, their driver, and NCCL."""

from __future__ import annotations

from hvlike.doctor.finding import Finding, nccl_version, numbers, of_every_rank, plural
from hvlike.doctor.gpu_facts import Gpus
from hvlike.doctor.job import Case, known

_INSTALL = "Install a torch that was built with CUDA (https://pytorch.org/get-started/locally)."


def check_gpu(case: Case) -> Finding:
    """The driver and the GPUs of every node, as its first rank sees them."""
    firsts = [case.ranks[node[0]] for node in case.nodes]
    seen = [(each.host, known(each.gpus), known(each.software).torch_cuda) for each in firsts]
    if all(gpus.driver is None and not gpus.devices for _, gpus, _ in seen):
        torch_cuda = seen[0][2]
        built_with = "" if torch_cuda is None else f", though torch was built with CUDA {torch_cuda}"
        return Finding.skip(f"no NVIDIA driver{built_with}: tensors stay on the CPU")
    finding = Finding()
    for host, gpus, torch_cuda in seen:
        where = f"{host}: " if len(seen) > 1 else ""
        finding.note(f"{where}driver {gpus.driver or 'unknown'}", *(where + device for device in gpus.devices))
        if gpus.visible is not None:
            finding.note(f"{where}CUDA_VISIBLE_DEVICES={gpus.visible}")
        _check_driver(finding, where, gpus, torch_cuda)
    return finding


def _check_driver(finding: Finding, where: str, gpus: Gpus, torch_cuda: str | None) -> None:
    update = f"Update the driver, or: {_INSTALL}"
    if torch_cuda is None:
        finding.warn(f"{where}torch was built for the CPU and does not see the GPUs", _INSTALL)
        return
    if gpus.wrong is not None:
        finding.fail(f"{where}torch cannot use them: {gpus.wrong}", update)
    elif not gpus.devices:
        finding.warn(f"{where}torch sees no GPU", "Look at CUDA_VISIBLE_DEVICES, and at the container's --gpus.")
    # A driver serves all versions of CUDA up to its own, and newer ones of the same major version.
    if gpus.driver_cuda is not None and gpus.driver_cuda // 1000 < numbers(torch_cuda)[0]:
        text = f"{where}the driver serves CUDA up to {in_cuda(gpus.driver_cuda)}, torch wants {torch_cuda}"
        finding.fail(text, update)


def check_gpu_sharing(case: Case) -> Finding:
    """How many ranks share a GPU."""
    counts = dict(of_every_rank(case, lambda each: each.gpus))
    if not any(each.devices for each in counts.values()):
        return Finding.skip("no GPU")
    finding = Finding()
    for node in case.nodes:
        host = case.ranks[node[0]].host
        seen = len(counts[node[0]].devices) if node[0] in counts else 0
        finding.note(f"{host}: {plural(len(node), 'rank')}, {plural(seen, 'GPU')} in sight of each")
        if 0 < seen < len(node) and counts[node[0]].visible is None:
            text = f"{host}: {len(node)} ranks share {plural(seen, 'GPU')}"
            finding.warn(text, "NCCL serves one rank a GPU: start one rank for each. docs/gpu.md")
    return finding


def in_cuda(number: int) -> str:
    """Return 12.4 for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def check_nccl(case: Case) -> Finding:
    """Whether CuPy reaches NCCL, and whether there is one copy of it, torch's."""
    state, gpus = known(case.me.nccl), known(case.me.gpus)
    facts = state.facts
    finding = Finding(*(state.cupy or ("no CuPy",)))
    if facts.version:
        finding.note(f"NCCL {nccl_version(facts.version)} through CuPy")
    if facts.torch_version:
        finding.note(f"NCCL {nccl_version(facts.torch_version)} of torch")
    finding.note(*state.loaded)
    if not gpus.devices:
        return Finding.skip("no GPU: NCCL has nothing to do", *(finding.found if state.cupy else ()))
    if len(state.cupy) > 1:
        advice = "Uninstall all of them, then install the one of your CUDA: `pip install hvlike[cuda12]` or [cuda13]."
        finding.fail("several distributions of CuPy overwrite each other's files", advice)
    if not facts.version:
        advice = "Until then CUDA tensors travel through host memory, which is slower. docs/gpu.md"
        finding.warn(f"NCCL cannot be used: {facts.missing}", advice)
    if len(state.loaded) > 1:
        advice = "Leave one, torch's: uninstall the other wheel, or take its folder out of LD_LIBRARY_PATH."
        finding.warn("two copies of NCCL are loaded in one process", advice)
    if facts.version and facts.torch_version and facts.version != facts.torch_version:
        versions = nccl_version(facts.version), nccl_version(facts.torch_version)
        advice = "Make them one: `pip install --force-reinstall` the nvidia-nccl wheel of torch."
        finding.warn(f"CuPy calls NCCL {versions[0]}, torch was built with {versions[1]}", advice)
    if len(state.packages) > 1:
        advice = "Uninstall the wheel that is not of torch's CUDA."
        finding.warn(f"several wheels of NCCL: {', '.join(state.packages)}", advice)
    return finding
