"""CUDA-aware MPI: what the library says of itself, and that saying so proves nothing."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, ok, skip
from hvlike.doctor.probe import Gap

_CLAIMS = {
    True: "the MPI library says that it takes memory of a GPU; nothing here has proved it",
    False: "the MPI library says that it does not take memory of a GPU",
    None: "the MPI library does not say whether it takes memory of a GPU",
}


def judge(case: Case) -> Finding:
    """What the running library claims. hvlike does not rely on it."""
    if isinstance(case.job.place, Gap):
        return skip("MPI did not start")
    claim = _CLAIMS[case.job.place.claims_cuda]
    if not known(case.me.gpus).devices:
        return skip(f"no GPU; {claim}")
    return ok(claim, "it need not: tensors of a GPU go by NCCL, or through host memory")
