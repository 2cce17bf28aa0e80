"""bench simulate: a training step on up to 100 000 ranks, after the LogGP model (loggp.py), from measured constants.

One machine cannot measure a network: without --latency and --bandwidth its messages are those between two local
ranks. Reductions and computation are taken to follow each other, so real steps with overlap cost less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvlike.bench import launching
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.loggp import Constants, Job, Workload
from hvlike.bench.options import positive
from hvlike.bench.plot import draw
from hvlike.bench.scaling import numbers
from hvlike.bench.simulate_report import as_text, panels, simulate
from hvlike.bench.sizes import parse_size
from hvlike.errors import LaunchError, UsageError
from hvlike.observe.picture import png

DEFAULT_RANKS = "1,2,8,32,128,512,2048,8192,32768,100000"


def above_zero(text: str) -> float:
    """Return a number above 0. Raises: argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--ranks", type=numbers, default=numbers(DEFAULT_RANKS), help=f"default {DEFAULT_RANKS}")
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default 8")
    parser.add_argument("--gradients", type=parse_size, default=parse_size("97.5MiB"), help="bytes, default 97.5MiB")
    parser.add_argument("--tensors", type=positive, default=161, help="they are in, default 161")
    parser.add_argument("--compute", type=above_zero, default=100.0, help="ms of a step alone, default 100")
    parser.add_argument(
        "--rounds", type=positive, default=1, help="messages of a rank to the coordinator in a negotiated step"
    )
    parser.add_argument("--latency", type=above_zero, help="of the network in us, in place of what is measured here")
    parser.add_argument("--bandwidth", type=above_zero, help="of a node's link in Gbit/s, in place of the same")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="take them from the --json of an earlier run")
    parser.add_argument("--timeout", type=positive, default=120, help="seconds for measuring, default 120")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=png, metavar="FILE.png", help="draw the steps; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Measure the constants on two ranks, compute, print. Outside of mpirun. Returns the exit status."""
    try:
        measured = _constants(options)
    except (LaunchError, UsageError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
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
    if options.json:
        print(json.dumps({**conditions, "results": [each.as_json() for each in steps]}))
    else:
        print(as_text(constants, conditions, steps))
    if options.plot:
        draw(options.plot, "a training step after the LogGP model", panels(steps))
    return 0


def override(measured: Constants, latency: float | None, bandwidth: float | None) -> Constants:
    """The constants with a network's latency (us) and bandwidth (Gbit/s) where they are given."""
    changed = measured
    if latency is not None:
        changed = replace(changed, latency=latency * 1e-6)
    if bandwidth is not None:
        changed = replace(changed, gap_per_byte=8e-9 / bandwidth)
    return changed


def read_constants(path: Path) -> Constants:
    """The constants in what an earlier run printed. Raises: UsageError."""
    try:
        return Constants(**json.loads(path.read_text())["constants"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--constants {path}: expected the output of `python -m hvlike bench simulate --json`, got {error!r}."
        ) from None


def _constants(options: argparse.Namespace) -> Constants:
    if options.constants is not None:
        return read_constants(options.constants)
    launching.refuse_inside_a_job(os.environ, "simulate")
    starter = launching.find()
    return Constants(**launching.run_job(starter, 2, "hvlike.bench.loggp_rank", [], {}, options.timeout))


BENCHMARK = Benchmark(
    "simulate", "a step on 1 to 100000 ranks after a model, from constants measured here", add_arguments, run
)
