"""python -m hvlike doctor: collect the facts, run the checks, report. Alone, or on every rank of a job."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import hvlike
from hvlike.collectives.session import basics
from hvlike.doctor.job import Case, collect_rank_facts, start_job
from hvlike.doctor.launching import Launchers, Trial, collect_launchers, try_two_ranks
from hvlike.doctor.model import Model, collect_model
from hvlike.doctor.probe import LIMIT, Gap, Prober
from hvlike.doctor.runner import as_json, as_text, has_failed, in_one_line, run_checks
from hvlike.transport.host.launchers import detect_launcher


def check_build() -> str:
    mpi, gloo = basics.mpi_built(), basics.gloo_built()
    frameworks = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
    groups: dict[str, dict[str, bool | int]] = {
        "Available Frameworks": {name: basics.extension_available(key) for name, key in frameworks.items()},
        "Available Controllers": {"MPI": mpi, "Gloo": gloo},
        "Available Tensor Operations": {
            "NCCL": basics.nccl_built(),
            "DDL": basics.ddl_built(),
            "CCL": basics.ccl_built(),
            "MPI": mpi,
            "Gloo": gloo,
        },
    }
    lines = [f"hvlike v{hvlike.__version__}:"]
    for title, entries in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return "\n".join(lines)


_HINT = "FILE.py:function that makes the model, or a number of parameters"
_MARGIN_SECONDS = 8.0
_LINGER_SECONDS = 5.0
_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run the doctor; returns 1 when a check fails, else 0. Under mpirun every rank calls it, and rank 0 reports."""
    purpose = "Look for what keeps jobs from working."
    parser = argparse.ArgumentParser(prog="python -m hvlike doctor", description=purpose)
    parser.add_argument(
        "--check-build", action="store_true", help="print what is built in, as horovodrun does, and end"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--model", metavar="MODEL", help=_HINT)
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
        case = collect_case(prober, options.model, reports=reports)
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


def collect_case(prober: Prober, wanted: str | None, *, reports: bool) -> Case:
    """Find everything out. Collective: every rank of the job; blocks.

    wanted: the model that the user has named. reports: this is the rank that reports.
    """
    own = collect_rank_facts(prober)
    launchers: Launchers | Gap | None = None
    trial: Trial | Gap | None = None
    model: Model | Gap | None = None
    if reports:
        library = None if isinstance(own.library, Gap) else own.library
        launchers = prober.ask(lambda: collect_launchers(library, os.environ))
        if isinstance(launchers, Launchers) and launchers.on_path and library and own.environment.launcher is None:
            first, seconds = launchers.on_path[0], max(1.0, prober.limit - _MARGIN_SECONDS)
            trial = prober.ask(lambda: try_two_ranks(first, seconds))
        if wanted is not None:
            model = prober.ask(lambda: collect_model(wanted))
    case = Case((own,), start_job(own, prober), launchers, trial, model)
    return replace(case, ranks=case.gathered.ranks) if case.gathered and case.gathered.ranks else case
