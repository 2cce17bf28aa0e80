"""bench scaling: what a training step sends at 1, 2, 4, ... ranks, planned and negotiated.

Starts a job for each number of ranks. Messages and bytes are counted where they leave (transport/traffic.py), so
they are exact on any machine; times are of this machine, which may have fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from hvlike.bench import launching
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.options import positive
from hvlike.bench.plot import draw
from hvlike.bench.scaling_report import Result, as_text, panels
from hvlike.errors import LaunchError, UsageError
from hvlike.observe.picture import png
from hvlike.transport.starters import Starter

DEFAULT_RANKS = "1,2,4,8,16,32"


def numbers(text: str) -> list[int]:
    """Return whole numbers above 0, separated by commas. Raises: argparse.ArgumentTypeError."""
    return [positive(each) for each in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--ranks", type=numbers, default=numbers(DEFAULT_RANKS), help=f"a job for each, default {DEFAULT_RANKS}"
    )
    parser.add_argument(
        "--ranks-per-node", type=positive, help="emulate nodes of so many ranks, to count what goes between them"
    )
    parser.add_argument("--steps", type=positive, default=20, help="counted and timed, default 20")
    parser.add_argument("--layers", type=positive, default=4, help="two gradients each, default 4")
    parser.add_argument("--width", type=positive, default=256, help="of a layer, default 256")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds for a job, default 300")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=png, metavar="FILE.png", help="draw the control messages; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Start the jobs and print what they have counted. Outside of mpirun. Returns the exit status."""
    try:
        launching.refuse_inside_a_job(os.environ, "scaling")
        starter = launching.find()
        results = [_measure(starter, ranks, options) for ranks in options.ranks]
    except (LaunchError, UsageError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    conditions = {
        "benchmark": "scaling",
        "tensors": 2 * options.layers,
        "bytes": 4 * options.layers * (options.width**2 + options.width),
        "steps": options.steps,
        "cores": len(os.sched_getaffinity(0)),
        "ranks_per_node": options.ranks_per_node,
        "launcher": starter.path,
    }
    if options.json:
        found = [
            {"ranks": each.ranks, "nodes": each.nodes, "ways": {name: way.as_json() for name, way in each.ways.items()}}
            for each in results
        ]
        print(json.dumps({**conditions, "results": found}))
    else:
        print(as_text(conditions, results))
    if options.plot:
        draw(options.plot, "what a training step sends", panels(results))
    return 0


def _measure(starter: Starter, ranks: int, options: argparse.Namespace) -> Result:
    arguments = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width")]
    knobs = {"HVLIKE_RANKS_PER_NODE": str(options.ranks_per_node)} if options.ranks_per_node else {}
    if not options.json:
        print(f"a job of {ranks} ranks ...", file=sys.stderr, flush=True)
    answer = launching.run_job(starter, ranks, "hvlike.bench.scaling_rank", arguments, knobs, options.timeout)
    return Result.of(answer)


BENCHMARK = Benchmark(
    "scaling", "what a training step sends at 1 to 32 ranks; run it without mpirun", add_arguments, run
)
