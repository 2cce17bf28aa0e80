"""The rungs in the order in which one rests on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvlike.doctor.case import Case, Unanswered
from hvlike.doctor.finding import Finding, Verdict
from hvlike.doctor.rungs import (
    cores,
    cuda_mpi,
    files,
    gpu,
    hosts,
    knobs,
    launcher,
    library,
    memory,
    nccl,
    programs,
    running,
    software,
)

Judge = Callable[[Case], Finding]

RUNGS: dict[str, Judge] = {
    "Python": software.judge_python,
    "torch": software.judge_torch,
    "mpi4py": software.judge_mpi4py,
    "MPI library": library.judge,
    "mpirun": programs.judge_belonging,
    "two ranks": programs.judge_trial,
    "settings": knobs.judge,
    "launcher": launcher.judge_launcher,
    "thread level": launcher.judge_threads,
    "hosts": hosts.judge,
    "same software": software.judge_sameness,
    "cores": cores.judge_cores,
    "threads": cores.judge_threads,
    "shared memory": memory.judge,
    "model": memory.judge_model,
    "GPU": gpu.judge,
    "GPU per rank": gpu.judge_sharing,
    "NCCL": nccl.judge,
    "CUDA in MPI": cuda_mpi.judge,
    "clock": files.judge_clock,
    "filesystem": files.judge_filesystems,
    "hvlike": running.judge_start,
    "allreduce": running.judge_allreduce,
}

_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."


@dataclass(frozen=True)
class Answer:
    """A rung and its finding."""

    rung: str
    finding: Finding


def climb(case: Case) -> list[Answer]:
    """Ask every rung, also above one that has failed."""
    return [Answer(name, _ask(judge, case)) for name, judge in RUNGS.items()]


def _ask(judge: Judge, case: Case) -> Finding:
    try:
        return judge(case)
    except Unanswered as unanswered:
        gap = unanswered.gap
        said = [f"| {line}" for line in gap.said]
        return Finding(Verdict.FAIL, (f"this step {gap.reason}", *said), (_STUCK,))


def has_failed(answers: list[Answer]) -> bool:
    """Whether some rung has."""
    return any(each.finding.verdict is Verdict.FAIL for each in answers)
