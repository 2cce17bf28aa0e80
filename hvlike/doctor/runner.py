"""Run the checks in the order in which one rests on another, and print their findings for people or programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable

import hvlike
from hvlike.doctor import gpus, job, launching, machine, model, software, timings
from hvlike.doctor.finding import Finding, Verdict, plural, quoted
from hvlike.doctor.job import Case
from hvlike.doctor.probe import Unanswered

CHECKS: dict[str, Callable[[Case], Finding]] = {
    "Python": software.check_python,
    "torch": software.check_torch,
    "mpi4py": software.check_mpi4py,
    "MPI library": software.check_mpi_library,
    "mpirun": launching.check_mpirun,
    "two ranks": launching.check_two_ranks,
    "settings": launching.check_settings,
    "launcher": launching.check_launcher,
    "thread level": job.check_thread_level,
    "hosts": job.check_hosts,
    "same software": software.check_sameness,
    "cores": machine.check_cores,
    "threads": machine.check_omp_threads,
    "shared memory": machine.check_shared_memory,
    "model": model.check_model,
    "GPU": gpus.check_gpu,
    "GPU per rank": gpus.check_gpu_sharing,
    "NCCL": gpus.check_nccl,
    "clock": machine.check_clock,
    "filesystem": machine.check_filesystems,
    "hvlike": job.check_start,
    "allreduce": timings.check_allreduce,
}

_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."
_WIDTH = 118
_NAME = 14
_LONGEST = 24


Findings = dict[str, Finding]  # By the names of the checks


def run_checks(case: Case) -> Findings:
    """Run every check, also after one that has failed."""
    return {name: _run(check, case) for name, check in CHECKS.items()}


def _run(check: Callable[[Case], Finding], case: Case) -> Finding:
    try:
        return check(case)
    except Unanswered as unanswered:
        return Finding.failed("", _STUCK, f"this step {unanswered.gap.reason}", *quoted(unanswered.gap.output))


def has_failed(findings: Findings) -> bool:
    return any(each.verdict is Verdict.FAIL for each in findings.values())


def as_text(case: Case, findings: Findings) -> str:
    where = f"{plural(len(case.ranks), 'rank')} on {plural(len(case.nodes), 'node')}"
    if case.unmet:
        where = f"one of {case.unmet} ranks, which did not come together"
    lines = [f"hvlike {hvlike.__version__} doctor: {where}", ""]
    for name, finding in findings.items():
        lines += _lines_of(name, finding)
    counts = Counter(each.verdict for each in findings.values())
    sums = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    ending = "something must be repaired, see FAIL" if has_failed(findings) else "nothing stands in the way of a job"
    return "\n".join([*lines, "", f"{sums}: {ending}"])


def _lines_of(name: str, finding: Finding) -> list[str]:
    head = f"{finding.verdict.value:>4}  {name:{_NAME}}"
    margin = " " * len(head)
    found = finding.found
    if len(found) > _LONGEST:
        # A job on very many hosts.
        found = [*found[:_LONGEST], f"... {len(found) - _LONGEST} lines more: --json has all"]
    lines: list[str] = []
    for text in found or [""]:
        lines += _wrap(text, margin if lines else head, margin + "  ")
    for text in finding.advice:
        lines += _wrap(text, margin + "-> ", margin + "   ")
    return [line.rstrip() for line in lines]


def _wrap(text: str, first: str, others: str) -> list[str]:
    # Words stay whole: users copy paths and options.
    wrapper = textwrap.TextWrapper(
        _WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [first]


def as_json(case: Case, findings: Findings) -> str:
    """Return one object: version, ranks, nodes, ok, and the checks in their order."""
    rungs = [
        {"rung": name, "verdict": each.verdict.value, "found": each.found, "advice": each.advice}
        for name, each in findings.items()
    ]
    head = {"hvlike": hvlike.__version__, "ranks": len(case.ranks), "nodes": len(case.nodes)}
    return json.dumps({**head, "ok": not has_failed(findings), "rungs": rungs}, indent=1)


def in_one_line(where: str, findings: Findings) -> str:
    """Return the first failure, for a rank that rank 0 could not ask."""
    name, first = next((name, each) for name, each in findings.items() if each.verdict is Verdict.FAIL)
    found = "; ".join(line for line in first.found if not line.startswith("| "))
    return f"{where}: FAIL {name}: {found} (rank 0 prints the whole report)"
