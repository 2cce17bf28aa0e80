"""python -m hvlike doctor: collect the facts, run the checks, report. Alone, or on every rank of a job."""

from __future__ import annotations

import argparse
import os
import sys

import hvlike
from hvlike.collectives.session import basics
from hvlike.doctor import job, machine_facts, runner, software_facts
from hvlike.doctor.job import Case, Meeting, RankFacts
from hvlike.doctor.machine_facts import Model
from hvlike.doctor.probe import LIMIT, Gap, Prober
from hvlike.doctor.software_facts import Programs, Trial
from hvlike.transport.host import launchers


def check_build() -> str:
    """The list. Local; starts neither MPI nor a GPU."""
    groups: dict[str, dict[str, bool | int]] = {
        "Available Frameworks": {
            "TensorFlow": basics.extension_available("tensorflow"),
            "PyTorch": basics.extension_available("torch"),
            "MXNet": basics.extension_available("mxnet"),
        },
        "Available Controllers": {"MPI": basics.mpi_built(), "Gloo": basics.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": basics.nccl_built(),
            "DDL": basics.ddl_built(),
            "CCL": basics.ccl_built(),
            "MPI": basics.mpi_built(),
            "Gloo": basics.gloo_built(),
        },
    }
    lines = [f"hvlike v{hvlike.__version__}:"]
    for title, entries in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return "\n".join(lines)


_HINT = "FILE.py:function that makes the model, or a number of parameters"
_MARGIN = 8.0
_LINGER = 5.0
_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run the doctor; returns 1 when a rung fails, else 0. Under mpirun every rank calls it, and rank 0 speaks.

    Blocks, every question at most for --limit seconds.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hvlike doctor", description="Look for what keeps jobs from working."
    )
    parser.add_argument(
        "--check-build", action="store_true", help="print what is built in, as horovodrun does, and end"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--model", metavar="MODEL", help=_HINT)
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for each question (%(default)g)")
    options = parser.parse_args(arguments)
    launcher = launchers.detect_launcher(os.environ)
    speaks = launcher is None or not launcher.rank
    if options.check_build:
        if speaks:
            print(check_build())
        return 0
    prober = Prober(options.limit)
    prober.interruption.watch()
    try:
        case = look(prober, options.model, speaks=speaks)
    except KeyboardInterrupt:
        print("the doctor was interrupted", file=sys.stderr)
        return _INTERRUPTED
    if not speaks and isinstance(case.job.meeting, Meeting):
        # Rank 0 has been told.
        return 0
    answers = runner.run_checks(case)
    if speaks:
        print(runner.as_json(case, answers) if options.json else runner.as_text(case, answers), flush=True)
        return int(runner.has_failed(answers))
    # Status 1 would have the launcher end rank 0 in the middle of its report, which fails for the same reason. Who was
    # ended because another one has failed has nothing to add.
    if runner.has_failed(answers) and not prober.interruption.came:
        number = launcher.rank if launcher is not None else 0
        print(runner.in_one_line(f"rank {number} on {case.me.host}", answers), file=sys.stderr, flush=True)
        # Nor may it miss a rank before it is through.
        prober.interruption.wait(_LINGER)
    return 0


def look(prober: Prober, wanted: str | None, *, speaks: bool) -> Case:
    """Find everything out. Collective: every rank of the job; blocks.

    wanted: the model that the user has named. speaks: this is the rank that reports.
    """
    own = job.collect_rank_facts(prober)
    library = None if isinstance(own.library, Gap) else own.library
    found = prober.ask(lambda: software_facts.collect_programs(library, os.environ)) if speaks else None
    trial = _trial(prober, found, own) if speaks else None
    chosen: Model | Gap | None = None
    if speaks and wanted is not None:
        chosen = prober.ask(lambda: machine_facts.collect_model(wanted))
    came = job.start_job(own, prober)
    meeting = came.meeting
    ranks = meeting.ranks if isinstance(meeting, Meeting) and meeting.ranks else (own,)
    return Case(ranks, came, found, trial, chosen)


def _trial(prober: Prober, found: Programs | Gap | None, own: RankFacts) -> Trial | Gap | None:
    if found is None or isinstance(found, Gap) or not found.on_path:
        return None
    if isinstance(own.library, Gap) or own.surroundings.launcher is not None:
        return None
    seconds = max(1.0, prober.limit - _MARGIN)
    return prober.ask(lambda: software_facts.try_out(found.on_path[0], seconds))
