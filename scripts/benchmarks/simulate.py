"""bench simulate: a training step on up to 100 000 ranks, by the LogGP model (loggp.py), from measured constants.

One machine cannot measure a network: without --latency and --bandwidth its messages are those between two local
ranks. Reductions and computation are taken to follow each other, so real steps with overlap cost less.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import outside_of_jobs, refuse_inside_a_job, run_job
from benchmarks.loggp import AGREEMENTS, REDUCTIONS, Constants, Job, Workload, measure, step
from hvlike.bench.harness.benchmark import add_outputs, positive, positives
from hvlike.bench.harness.report import Curves, parse_size, publish, table
from hvlike.errors import UsageError
from hvlike.observe.printing import format_seconds, format_size

PURPOSE = "a step on 1 to 100000 ranks, by a model"

REDUCTION = "hierarchical"  # The one that hvlike does. The steps are computed with it.
DEFAULT_RANKS = "1,2,8,32,128,512,2048,8192,32768,100000"


@dataclass(frozen=True)
class Step:
    ranks: int
    nodes: int
    agreement: dict[str, float]
    reduction: dict[str, float]
    total: dict[str, float]  # With each agreement, and the hierarchical reduction
    efficiency: dict[str, float]  # Computation as a part of the step


def simulate(constants: Constants, job: Job, work: Workload) -> Step:
    total = {name: step(constants, job, work, name, REDUCTION) for name in AGREEMENTS}
    return Step(
        job.ranks,
        job.nodes,
        {name: agree(constants, job, work) for name, agree in AGREEMENTS.items()},
        {name: reduce(constants, job, work.nbytes) for name, reduce in REDUCTIONS.items()},
        total,
        {name: work.compute / seconds for name, seconds in total.items()},
    )


def as_text(constants: Constants, conditions: dict[str, Any], steps: Sequence[Step]) -> str:
    work = conditions["workload"]
    head = (
        f"a step of {format_seconds(work['compute'])} with {format_size(int(work['nbytes']))} of gradients in "
        f"{work['tensors']} tensors, {conditions['ranks_per_node']} ranks a node, by the LogGP model"
    )
    header = ["ranks", "nodes", *(f"{name} agreement" for name in AGREEMENTS), *REDUCTIONS]
    header += [f"step, {name}" for name in AGREEMENTS]
    rows = []
    for each in steps:
        row = [str(each.ranks), str(each.nodes)]
        row += [_time(each.agreement[name]) for name in AGREEMENTS]
        row += [_time(each.reduction[name]) for name in REDUCTIONS]
        row += [f"{format_seconds(each.total[name])} ({each.efficiency[name]:.0%})" for name in AGREEMENTS]
        rows.append(row)
    foot = (
        "Agreement and reduction in seconds of one step; step: with the hierarchical reduction, nothing overlapped\n"
        "(computation as a part of it). negotiated: one coordinator takes a message of each node, and of each rank of\n"
        f"its own, and answers it, {work['rounds']} time(s) a step.\n"
        "flat: by messages between all ranks, at the network's speed inside a node, too."
    )
    return "\n\n".join([head, _describe(constants, conditions), table(header, rows), foot])


def panels(steps: Sequence[Step]) -> list[Curves]:
    ranks = [float(each.ranks) for each in steps]
    labels = [str(each.ranks) for each in steps]
    totals = {name: [1e3 * each.total[name] for each in steps] for name in AGREEMENTS}
    parts = {f"{name} reduction": [1e3 * each.reduction[name] or float("nan") for each in steps] for name in REDUCTIONS}
    parts["negotiated agreement"] = [1e3 * each.agreement["negotiated"] or float("nan") for each in steps]
    return [Curves("step", "ranks", "ms", ranks, totals, labels), Curves("parts", "ranks", "ms", ranks, parts, labels)]


def _describe(constants: Constants, conditions: dict[str, Any]) -> str:
    link = 8e-9 / constants.gap_per_byte if constants.gap_per_byte else float("inf")
    network = f"L {_time(constants.latency)}, link {link:.3g} Gbit/s"
    if conditions["network_measured"]:
        network += " between two ranks of this machine: NO NETWORK was measured, give it: --latency, --bandwidth"
    else:
        network += " as given, in part or in whole, by --latency and --bandwidth"
    return (
        f"network: {network}\n"
        f"measured here: o {_time(constants.overhead)}, g {_time(constants.gap)} a message; "
        f"shared memory {_time(constants.memory_floor)} and {1e-9 / constants.memory:.3g} GB/s for two ranks; "
        f"addition {1e-9 / constants.fold:.3g} GB/s\n"
        f"coordinator: {_time(constants.take)} to take a message and {_time(constants.take_entry)} for each tensor "
        f"in it, {_time(constants.tell)} and {_time(constants.tell_entry)} to send one, "
        f"{constants.entry_bytes:.0f} bytes a tensor"
    )


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"


def above_zero(text: str) -> float:
    """Return a number above 0. Raises: argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positives, default=DEFAULT_RANKS, help="default %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default 8")
    parser.add_argument("--gradients", type=parse_size, default=parse_size("97.5MiB"), help="bytes, default 97.5MiB")
    parser.add_argument("--tensors", type=positive, default=161, help="they are in, default 161")
    parser.add_argument("--compute", type=above_zero, default=100.0, help="ms of a step alone, default 100")
    rounds = "messages of a rank to the coordinator in a negotiated step"
    parser.add_argument("--rounds", type=positive, default=1, help=rounds)
    parser.add_argument("--latency", type=above_zero, help="of the network in us, in place of what is measured here")
    parser.add_argument("--bandwidth", type=above_zero, help="of a node's link in Gbit/s, in place of the same")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="take them from the --json of an earlier run")
    parser.add_argument("--timeout", type=positive, default=120, help="seconds for measuring, default 120")
    add_outputs(parser)


@outside_of_jobs
def run(options: argparse.Namespace) -> None:
    measured = _constants(options)
    constants = override(measured, options.latency, options.bandwidth)
    work = Workload(options.gradients, options.tensors, options.compute / 1e3, options.rounds)
    steps = [simulate(constants, Job(ranks, options.ranks_per_node), work) for ranks in options.ranks]
    conditions: dict[str, Any] = {
        "benchmark": "simulate",
        "constants": asdict(measured),
        "latency": constants.latency,
        "gap_per_byte": constants.gap_per_byte,
        "network_measured": options.latency is None and options.bandwidth is None,
        "ranks_per_node": options.ranks_per_node,
        "workload": asdict(work),
    }
    document = {**conditions, "results": [asdict(each) for each in steps]}
    title = "a training step by the LogGP model"
    publish(options, document, as_text(constants, conditions, steps), title, panels(steps))


def override(measured: Constants, latency: float | None, bandwidth: float | None) -> Constants:
    """Return the constants with a network's latency (us) and bandwidth (Gbit/s) where these are given."""
    given = {} if latency is None else {"latency": latency * 1e-6}
    given |= {} if bandwidth is None else {"gap_per_byte": 8e-9 / bandwidth}
    return replace(measured, **given)


def read_constants(path: Path) -> Constants:
    """Return the constants that an earlier run has printed. Raises: UsageError."""
    try:
        return Constants(**json.loads(path.read_text())["constants"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--constants {path}: expected the output of `scripts/bench simulate --json`, got {error!r}."
        ) from None


def _constants(options: argparse.Namespace) -> Constants:
    if options.constants is not None:
        return read_constants(options.constants)
    refuse_inside_a_job(os.environ, "simulate")
    return run_job(measure, (), 2, {}, options.timeout)
