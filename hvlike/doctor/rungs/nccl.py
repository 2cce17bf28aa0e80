"""NCCL: whether CuPy reaches it, and that there is one copy of it, torch's."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, conclude, fail, skip, warn
from hvlike.doctor.rungs.wording import nccl_version


def judge(case: Case) -> Finding:
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
