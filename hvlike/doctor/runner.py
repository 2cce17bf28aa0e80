"""Run the checks in the order in which one rests on another, and print their findings for people or programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import hvlike
from hvlike.doctor import gpu_checks, job_checks, machine_checks, software_checks
from hvlike.doctor.finding import Finding, Verdict
from hvlike.doctor.job import Case, Unanswered

Judge = Callable[[Case], Finding]

CHECKS: dict[str, Judge] = {
    "Python": software_checks.judge_python,
    "torch": software_checks.judge_torch,
    "mpi4py": software_checks.judge_mpi4py,
    "MPI library": software_checks.judge_library,
    "mpirun": software_checks.judge_belonging,
    "two ranks": software_checks.judge_trial,
    "settings": software_checks.judge_knobs,
    "launcher": job_checks.judge_launcher,
    "thread level": job_checks.judge_thread_level,
    "hosts": job_checks.judge_hosts,
    "same software": software_checks.judge_sameness,
    "cores": machine_checks.judge_cores,
    "threads": machine_checks.judge_omp_threads,
    "shared memory": machine_checks.judge_shared_memory,
    "model": machine_checks.judge_model,
    "GPU": gpu_checks.judge_gpu,
    "GPU per rank": gpu_checks.judge_gpu_sharing,
    "NCCL": gpu_checks.judge_nccl,
    "clock": machine_checks.judge_clock,
    "filesystem": machine_checks.judge_filesystems,
    "hvlike": job_checks.judge_start,
    "allreduce": job_checks.judge_allreduce,
}

_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."


@dataclass(frozen=True)
class Answer:
    """A rung and its finding."""

    rung: str
    finding: Finding


def run_checks(case: Case) -> list[Answer]:
    """Ask every rung, also above one that has failed."""
    return [Answer(name, _ask(judge, case)) for name, judge in CHECKS.items()]


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


_WIDTH = 118
_NAME = 14
_LONGEST = 24


def as_text(case: Case, answers: list[Answer]) -> str:
    """The ladder: what each rung found, and what to do."""
    ranks, nodes = len(case.ranks), len(case.nodes)
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if case.unmet:
        where = f"one of {case.unmet} ranks, which did not come together"
    lines = [f"hvlike {hvlike.__version__} doctor: {where}", ""]
    for answer in answers:
        lines += _rung(answer)
    counts = Counter(each.finding.verdict for each in answers)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    ending = "something has to be mended, see FAIL" if has_failed(answers) else "nothing stands in the way of a job"
    return "\n".join([*lines, "", f"{told}: {ending}"])


def _rung(answer: Answer) -> list[str]:
    finding = answer.finding
    head = f"{finding.verdict.value:>4}  {answer.rung:{_NAME}}"
    margin = " " * len(head)
    lines: list[str] = []
    for text in shortened([line for line in finding.found if line]) or [""]:
        first = margin if lines else head
        lines += _wrap(text, first, margin + "  ")
    for text in finding.advice:
        lines += _wrap(text, margin + "-> ", margin + "   ")
    return [line.rstrip() for line in lines]


def shortened(found: list[str]) -> list[str]:
    """What a screen takes of a job on very many hosts."""
    if len(found) <= _LONGEST:
        return found
    return [*found[:_LONGEST], f"... {len(found) - _LONGEST} lines more: --json has all"]


def _wrap(text: str, first: str, others: str) -> list[str]:
    """Lines of at most _WIDTH characters; paths and options are to be copied, so words stay whole."""
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first]


def as_json(case: Case, answers: list[Answer]) -> str:
    """One object: version, ranks, nodes, ok, and the rungs in their order."""
    rungs = [
        {
            "rung": each.rung,
            "verdict": each.finding.verdict.value,
            "found": [line for line in each.finding.found if line],
            "advice": list(each.finding.advice),
        }
        for each in answers
    ]
    return json.dumps(
        {
            "hvlike": hvlike.__version__,
            "ranks": len(case.ranks),
            "nodes": len(case.nodes),
            "ok": not has_failed(answers),
            "rungs": rungs,
        },
        indent=1,
    )


def in_one_line(where: str, answers: list[Answer]) -> str:
    """The first failure of a rank that rank 0 could not ask, and how to see all."""
    first = next(each for each in answers if each.finding.verdict is Verdict.FAIL)
    found = "; ".join(line for line in first.finding.found if line and not line.startswith("| "))
    return f"{where}: FAIL {first.rung}: {found} (rank 0 prints the whole ladder)"
