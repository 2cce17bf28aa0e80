"""Run the checks in the order in which one rests on another, and print their findings for people or programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import hvlike
from hvlike.doctor import gpu_checks, job_checks, machine_checks, software_checks
from hvlike.doctor.finding import Finding, Verdict, plural
from hvlike.doctor.job import Case, Unanswered

Check = Callable[[Case], Finding]

CHECKS: dict[str, Check] = {
    "Python": software_checks.check_python,
    "torch": software_checks.check_torch,
    "mpi4py": software_checks.check_mpi4py,
    "MPI library": software_checks.check_mpi_library,
    "mpirun": software_checks.check_mpirun,
    "two ranks": software_checks.check_two_ranks,
    "settings": software_checks.check_settings,
    "launcher": job_checks.check_launcher,
    "thread level": job_checks.check_thread_level,
    "hosts": job_checks.check_hosts,
    "same software": software_checks.check_sameness,
    "cores": machine_checks.check_cores,
    "threads": machine_checks.check_omp_threads,
    "shared memory": machine_checks.check_shared_memory,
    "model": machine_checks.check_model,
    "GPU": gpu_checks.check_gpu,
    "GPU per rank": gpu_checks.check_gpu_sharing,
    "NCCL": gpu_checks.check_nccl,
    "clock": machine_checks.check_clock,
    "filesystem": machine_checks.check_filesystems,
    "hvlike": job_checks.check_start,
    "allreduce": job_checks.check_allreduce,
}

_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."
_WIDTH = 118
_NAME = 14
_LONGEST = 24


class Answer(NamedTuple):
    """A check and its finding."""

    check: str
    finding: Finding


def run_checks(case: Case) -> list[Answer]:
    """Run every check, also after one that has failed."""
    return [Answer(name, _run(check, case)) for name, check in CHECKS.items()]


def _run(check: Check, case: Case) -> Finding:
    try:
        return check(case)
    except Unanswered as unanswered:
        gap = unanswered.gap
        finding = Finding(f"this step {gap.reason}", *(f"| {line}" for line in gap.output))
        finding.fail("", _STUCK)
        return finding


def has_failed(answers: list[Answer]) -> bool:
    """Return whether a check has failed."""
    return any(each.finding.verdict is Verdict.FAIL for each in answers)


def as_text(case: Case, answers: list[Answer]) -> str:
    """Return what each check found, and what to do."""
    where = f"{plural(len(case.ranks), 'rank')} on {plural(len(case.nodes), 'node')}"
    if case.unmet:
        where = f"one of {case.unmet} ranks, which did not come together"
    lines = [f"hvlike {hvlike.__version__} doctor: {where}", ""]
    for answer in answers:
        lines += _lines_of(answer)
    counts = Counter(each.finding.verdict for each in answers)
    sums = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    ending = "something must be repaired, see FAIL" if has_failed(answers) else "nothing stands in the way of a job"
    return "\n".join([*lines, "", f"{sums}: {ending}"])


def _lines_of(answer: Answer) -> list[str]:
    head = f"{answer.finding.verdict.value:>4}  {answer.check:{_NAME}}"
    margin = " " * len(head)
    found = answer.finding.found
    if len(found) > _LONGEST:
        # A job on very many hosts.
        found = [*found[:_LONGEST], f"... {len(found) - _LONGEST} lines more: --json has all"]
    lines: list[str] = []
    for text in found or [""]:
        lines += _wrap(text, margin if lines else head, margin + "  ")
    for text in answer.finding.advice:
        lines += _wrap(text, margin + "-> ", margin + "   ")
    return [line.rstrip() for line in lines]


def _wrap(text: str, first: str, others: str) -> list[str]:
    """Return lines of at most _WIDTH characters. Words stay whole: users copy paths and options."""
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
    """Return one object: version, ranks, nodes, ok, and the checks in their order."""
    rungs = [
        {
            "rung": each.check,
            "verdict": each.finding.verdict.value,
            "found": each.finding.found,
            "advice": each.finding.advice,
        }
        for each in answers
    ]
    head = {"hvlike": hvlike.__version__, "ranks": len(case.ranks), "nodes": len(case.nodes)}
    return json.dumps({**head, "ok": not has_failed(answers), "rungs": rungs}, indent=1)


def in_one_line(where: str, answers: list[Answer]) -> str:
    """Return the first failure, for a rank that rank 0 could not ask."""
    first = next(each for each in answers if each.finding.verdict is Verdict.FAIL)
    found = "; ".join(line for line in first.finding.found if not line.startswith("| "))
    return f"{where}: FAIL {first.check}: {found} (rank 0 prints the whole report)"
