"""python -m hvlike doctor: collect the facts, run the checks, report. Alone, or on every rank of a job."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable

import hvlike
from hvlike.collectives.session import basics
from hvlike.doctor import gpus, job, launching, machine, software
from hvlike.doctor.finding import Finding, Verdict, plural
from hvlike.doctor.job import Case, Gathered, collect_rank_facts, start_job
from hvlike.doctor.probe import LIMIT, Gap, Prober, Skipped, Unanswered
from hvlike.launch.trial import Launchers, Trial, collect_launchers, try_ranks
from hvlike.transport.host.launchers import detect_launcher

Findings = dict[str, Finding]  # By the names of the checks
CHECKS: dict[str, Callable[[Case, Finding], None]] = {
    "software": software.check_software,
    "MPI library": software.check_mpi_library,
    "mpirun": launching.check_mpirun,
    "two ranks": launching.check_two_ranks,
    "settings": launching.check_settings,
    "launcher": launching.check_launcher,
    "surroundings": launching.check_surroundings,
    "hosts": job.check_hosts,
    "same software": software.check_sameness,
    "cores": machine.check_cores,
    "threads": machine.check_omp_threads,
    "places": machine.check_places,
    "shared memory": machine.check_shared_memory,
    "GPU": gpus.check_gpu,
    "NCCL": gpus.check_nccl,
    "temporary": machine.check_temporary_files,
    "hvlike": job.check_start,
    "allreduce": job.check_allreduce,
}
_STUCK = "It did not answer in time or broke down. Run the same step by hand; --limit SECONDS allows more time."
_WIDTH = 118
_NAME = 14
_LONGEST = 24  # Lines of a check
_MARGIN_SECONDS = 8.0
_LINGER_SECONDS = 5.0
_INTERRUPTED = 130


def check_build() -> str:
    """Return the table that `horovodrun --check-build` prints."""
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
        finding = Finding(Verdict.SKIP)
        finding.note(*skipped.args)
    except Unanswered as unanswered:
        (gap,) = unanswered.args
        finding.fail(f"this step {gap.reason}", _STUCK, gap.output)
    return finding


def has_failed(findings: Findings) -> bool:
    return any(finding.verdict is Verdict.FAIL for finding in findings.values())


def as_text(case: Case, findings: Findings) -> str:
    where = f"{plural(len(case.ranks), 'rank')} on {plural(len(case.nodes), 'node')}"
    if case.unmet:
        where = f"one of {case.unmet} ranks, which did not come together"
    lines = [f"hvlike {hvlike.__version__} doctor: {where}", ""]
    for name, finding in findings.items():
        lines += _lines_of(name, finding)
    counts = Counter(finding.verdict for finding in findings.values())
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
    # Words stay whole: users copy paths and options.
    wrapper = textwrap.TextWrapper(_WIDTH, head, margin + "  ", break_long_words=False, break_on_hyphens=False)
    lines: list[str] = []
    for text in (*found, *(f"-> {advice}" for advice in finding.advice)):
        lines += wrapper.wrap(text)
        wrapper.initial_indent = margin
    return lines


def as_json(case: Case, findings: Findings) -> str:
    """Return one object: version, ranks, nodes, ok, and the checks in their order."""
    checks = [
        {"check": name, "verdict": finding.verdict.value, "found": finding.found, "advice": finding.advice}
        for name, finding in findings.items()
    ]
    head = {"hvlike": hvlike.__version__, "ranks": len(case.ranks), "nodes": len(case.nodes)}
    return json.dumps({**head, "ok": not has_failed(findings), "checks": checks}, indent=1)


def in_one_line(findings: Findings) -> str:
    """Return the first failure, for a rank that rank 0 could not ask."""
    name, finding = next((name, finding) for name, finding in findings.items() if finding.verdict is Verdict.FAIL)
    found = "; ".join(line for line in finding.found if not line.startswith("| "))
    return f"FAIL {name}: {found} (rank 0 prints the whole report)"


def main(arguments: list[str]) -> int:
    """Run the doctor; returns 1 when a check fails, else 0. Under mpirun every rank calls it, and rank 0 reports."""
    parser = argparse.ArgumentParser("python -m hvlike doctor", description="Look for what keeps jobs from working.")
    parser.add_argument("--check-build", action="store_true", help="print what is built in as horovodrun does, and end")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for each question (%(default)g)")
    options = parser.parse_args(arguments)
    launcher = detect_launcher(os.environ)
    rank = 0 if launcher is None else launcher.rank or 0
    reports = rank == 0
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
    if not reports and isinstance(case.job.gathered, Gathered):
        # Rank 0 has all that this rank has found.
        return 0
    findings = run_checks(case)
    if reports:
        print(as_json(case, findings) if options.json else as_text(case, findings), flush=True)
        return int(has_failed(findings))
    # With status 1 the launcher would end rank 0 in the middle of its report, which fails for the same reason. A rank
    # that is ended because another one has failed has nothing to add.
    if has_failed(findings) and not prober.interrupted:
        print(f"rank {rank} on {case.me.host}: {in_one_line(findings)}", file=sys.stderr, flush=True)
        # Nor may rank 0 miss a rank before it has reported.
        prober.wait_for_interruption(_LINGER_SECONDS)
    return 0


def collect_case(prober: Prober, *, reports: bool) -> Case:
    """Find everything out. Collective: every rank of the job; blocks."""
    own = collect_rank_facts(prober)
    library = own.library
    launchers: Launchers | Gap | None = None
    trial: Trial | Gap | None = None
    if reports and not isinstance(library, Gap):
        launchers = prober.ask(lambda: collect_launchers(library, os.environ))
        if own.launcher is None and isinstance(launchers, Launchers) and launchers.tried is not None:
            mpirun, seconds = launchers.tried, max(1.0, prober.limit - _MARGIN_SECONDS)
            trial = prober.ask(lambda: try_ranks(mpirun, seconds))
    progress = start_job(own, prober)
    ranks = progress.gathered.ranks if isinstance(progress.gathered, Gathered) else ()
    return Case(ranks or (own,), progress, launchers, trial)
