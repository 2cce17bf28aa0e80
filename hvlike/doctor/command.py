"""python -m hvlike doctor: collect the facts, run the checks, report. Alone, or on every rank of a job."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hvlike
from hvlike.collectives.session import basics
from hvlike.doctor import gpus, job, launching, machine, software
from hvlike.doctor.finding import Finding, Skipped, Verdict, plural, quoted
from hvlike.doctor.job import Case, collect_rank_facts, start_job
from hvlike.doctor.launching import Launchers, Trial, collect_launchers, try_ranks
from hvlike.doctor.probe import LIMIT, Gap, Prober, Unanswered
from hvlike.transport.host.launchers import detect_launcher

CHECKS: dict[str, Callable[[Case, Finding], None]] = {
    "Python": software.check_python,
    "torch": software.check_torch,
    "mpi4py": software.check_mpi4py,
    "MPI library": software.check_mpi_library,
    "mpirun": launching.check_mpirun,
    "two ranks": launching.check_two_ranks,
    "settings": launching.check_settings,
    "launcher": launching.check_launcher,
    "lost ranks": launching.check_losses,
    "thread level": job.check_thread_level,
    "hosts": job.check_hosts,
    "same software": software.check_sameness,
    "cores": machine.check_cores,
    "threads": machine.check_omp_threads,
    "shared memory": machine.check_shared_memory,
    "GPU": gpus.check_gpu,
    "GPU per rank": gpus.check_gpu_sharing,
    "NCCL": gpus.check_nccl,
    "temporary": machine.check_temporary_files,
    "hvlike": job.check_start,
    "allreduce": job.check_allreduce,
}
_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."
_WIDTH = 118
_NAME = 14
_LONGEST = 24
Findings = dict[str, Finding]  # By the names of the checks
_MARGIN_SECONDS = 8.0
_LINGER_SECONDS = 5.0
_INTERRUPTED = 130


def check_build() -> str:
    frameworks = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
    groups: dict[str, dict[str, bool | int]] = {
        "Available Frameworks": {name: basics.extension_available(key) for name, key in frameworks.items()},
        "Available Controllers": {"MPI": basics.mpi_built(), "Gloo": basics.gloo_built()},
        "Available Tensor Operations": {
            name: getattr(basics, f"{name.lower()}_built")() for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")
        },
    }
    lines = [f"hvlike v{hvlike.__version__}:"]
    for title, entries in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return "\n".join(lines)


def run_checks(case: Case) -> Findings:
    """Run every check, also after one that has failed."""
    return {name: _run(check, case) for name, check in CHECKS.items()}


def _run(check: Callable[[Case, Finding], None], case: Case) -> Finding:
    finding = Finding()
    try:
        check(case, finding)
    except Skipped as skipped:
        finding = Finding(*skipped.args, skipped=True)
    except Unanswered as unanswered:
        (gap,) = unanswered.args
        finding = Finding(f"this step {gap.reason}", *quoted(gap.output))
        finding.fail("", _STUCK)
    return finding


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
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others, **how) or [first]


def as_json(case: Case, findings: Findings) -> str:
    """Return one object: version, ranks, nodes, ok, and the checks in their order."""
    checks = [
        {"check": name, "verdict": each.verdict.value, "found": each.found, "advice": each.advice}
        for name, each in findings.items()
    ]
    head = {"hvlike": hvlike.__version__, "ranks": len(case.ranks), "nodes": len(case.nodes)}
    return json.dumps({**head, "ok": not has_failed(findings), "checks": checks}, indent=1)


def in_one_line(where: str, findings: Findings) -> str:
    """Return the first failure, for a rank that rank 0 could not ask."""
    name, first = next((name, each) for name, each in findings.items() if each.verdict is Verdict.FAIL)
    found = "; ".join(line for line in first.found if not line.startswith("| "))
    return f"{where}: FAIL {name}: {found} (rank 0 prints the whole report)"


def main(arguments: list[str]) -> int:
    """Run the doctor; returns 1 when a check fails, else 0. Under mpirun every rank calls it, and rank 0 reports."""
    purpose = "Look for what keeps jobs from working."
    parser = argparse.ArgumentParser(prog="python -m hvlike doctor", description=purpose)
    built = "print what is built in, as horovodrun does, and end"
    parser.add_argument("--check-build", action="store_true", help=built)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for each question (%(default)g)")
    options = parser.parse_args(arguments)
    launcher = detect_launcher(os.environ)
    reports = launcher is None or not launcher.rank
    if options.check_build:
        if reports:
            print(check_build())
        return 0
    prober = Prober(options.limit)
    prober.watch_for_interruption()
    try:
        case = collect_case(prober, reports=reports)
    except KeyboardInterrupt:
        print("the doctor was interrupted", file=sys.stderr)
        return _INTERRUPTED
    if not reports and case.gathered is not None:
        # Rank 0 has all that this rank has found.
        return 0
    findings = run_checks(case)
    if reports:
        print(as_json(case, findings) if options.json else as_text(case, findings), flush=True)
        return int(has_failed(findings))
    # With status 1 the launcher would end rank 0 in the middle of its report, which fails for the same reason. A rank
    # that is ended because another one has failed has nothing to add.
    if has_failed(findings) and not prober.interrupted:
        number = launcher.rank if launcher is not None else 0
        print(in_one_line(f"rank {number} on {case.me.host}", findings), file=sys.stderr, flush=True)
        # Nor may rank 0 miss a rank before it has reported.
        prober.wait_for_interruption(_LINGER_SECONDS)
    return 0


def collect_case(prober: Prober, *, reports: bool) -> Case:
    """Find everything out. Collective: every rank of the job; blocks."""
    own = collect_rank_facts(prober)
    launchers: Launchers | Gap | None = None
    trial: Trial | Gap | None = None
    if reports:
        library = None if isinstance(own.library, Gap) else own.library
        launchers = prober.ask(lambda: collect_launchers(library, os.environ))
        if isinstance(launchers, Launchers) and launchers.on_path and library and own.environment.launcher is None:
            first, seconds = launchers.on_path[0], max(1.0, prober.limit - _MARGIN_SECONDS)
            trial = prober.ask(lambda: try_ranks(first, seconds))
    case = Case((own,), start_job(own, prober), launchers, trial)
    return replace(case, ranks=case.gathered.ranks) if case.gathered and case.gathered.ranks else case
