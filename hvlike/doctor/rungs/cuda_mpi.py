"""CUDA-aware MPI: what the library says of itself, and whether sums of this job have proved it."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, ok, skip
from hvlike.doctor.probe import Gap

_CLAIMS = {
    True: "the MPI library says that it takes memory of a GPU",
    False: "the MPI library says that it does not take memory of a GPU",
    None: "the MPI library does not say whether it takes memory of a GPU",
}
_PLANE = "mpi"


def judge(case: Case) -> Finding:
    """What the running library claims, and what came of it."""
    if isinstance(case.job.place, Gap):
        return skip("MPI did not start")
    claim = _CLAIMS[case.job.place.claims_cuda]
    if not known(case.me.gpus).devices:
        return skip(f"no GPU; {claim}")
    if _is_proven(case):
        return ok(claim, "proven: it has moved memory of a GPU for the sums below, which are right")
    return ok(claim, "not proven, and not relied on: tensors of a GPU take another way, docs/gpu.md")


def _is_proven(case: Case) -> bool:
    timings = case.job.timings
    if timings is None or isinstance(timings, Gap):
        return False
    rows = [row for timing in timings.timings if timing.way.plane == _PLANE for row in timing.rows]
    return bool(rows) and all(row.right for row in rows)
