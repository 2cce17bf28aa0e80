"""bench waiting: what a rank's waiting costs its own computation, and how soon it notices that the wait is over.

Rank 0 starts an operation for which rank 1 comes late, and computes meanwhile: any slowdown is the doing of its
own waiting. Once where the system puts the threads, once with the main thread and the background thread of a rank
on one core, the hard case. Rank 1 sleeps in a system call and uses no core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch

import hvlike
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.comparison import Summary
from hvlike.bench.conditions import describe_alone, heading, runs_on_two_ranks
from hvlike.bench.options import add_common
from hvlike.bench.plot import Bars, draw
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds
from hvlike.bench.waiting_measure import AGAIN, NAMED, PLANNED, latencies, ratios, slowdowns
from hvlike.bench.waiting_peer import Bell
from hvlike.bench.waiting_work import works
from hvlike.collectives.context import current

FREE, ONE_CORE = "threads where the system puts them", "both threads of a rank on one core"
_REPETITIONS = 15
_LATENCIES = 4
"""So many times more of them, they are short."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_common(parser, f"{_REPETITIONS}, about a minute in all")
    parser.add_argument(
        "--switch-interval",
        type=float,
        default=sys.getswitchinterval(),
        metavar="SECONDS",
        help="after which a thread may ask another one for the GIL; default %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective; two ranks of one host. Returns the exit status."""
    # Else a bucket starts in step() only, where the main thread waits itself.
    os.environ["HVLIKE_OVERLAP"] = "1"
    torch.set_num_threads(1)
    sys.setswitchinterval(options.switch_interval)
    if not runs_on_two_ranks("waiting"):
        return 2
    repetitions = options.repetitions or _REPETITIONS
    conditions = {**describe_alone("waiting"), "switch_interval": options.switch_interval}
    bell = Bell()
    found: dict[str, dict[str, Any]] = {}
    for place in (FREE, ONE_CORE):
        if place is ONE_CORE:
            pin()
        seconds = slowdowns(works(), repetitions, options.seed, bell)
        late = latencies(works(), repetitions * _LATENCIES, options.seed, bell)
        found[place] = {"slowdown": {name: ratios(each) for name, each in seconds.items()}, "latency": late}
    bell.close()
    if hvlike.rank() == 0:
        show(options, conditions, found)
    hvlike.shutdown()
    return 0


def pin() -> None:
    """Put the main thread and the background thread of this rank on one core, another one for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[hvlike.rank() % len(cores)]
    os.sched_setaffinity(0, {core})
    current().fabric.loop.pin(core)


def show(options: argparse.Namespace, conditions: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Print what was found, and draw it."""
    if options.json:
        print(json.dumps({**conditions, "results": as_json(found)}))
    else:
        print(as_text(conditions, found))
    if options.plot:
        draw(options.plot, "what waiting costs", panels(found))


def as_json(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results for machines: median, quartiles and samples of everything."""
    return {
        place: {
            "slowdown": {
                work: {wait: {**asdict(Summary.of(each)), "samples": each} for wait, each in waits.items()}
                for work, waits in results["slowdown"].items()
            },
            "latency": {
                work: {**asdict(Summary.of(each)), "samples": each} for work, each in results["latency"].items()
            },
        }
        for place, results in found.items()
    }


def as_text(conditions: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """Two tables for each place of the threads."""
    interval = format_seconds(conditions["switch_interval"])
    parts = [f"what waiting costs a rank, {heading(conditions)}\nthe GIL changes hands after {interval}"]
    for place, results in found.items():
        rows = [
            [work, *(_ratio(waits[wait]) for wait in (AGAIN, NAMED, PLANNED))]
            for work, waits in results["slowdown"].items()
        ]
        slowdown = table(["slowdown of", f"waits for {AGAIN}", NAMED, PLANNED], rows)
        late = [[work, *_times(each)] for work, each in results["latency"].items()]
        latency = table(["ended after, main thread in", "median", "quartiles", "worst"], late)
        parts.append(f"{place}\n{slowdown}\n\n{latency}")
    parts.append(
        "slowdown: time of the main thread's work while its rank waits, to the same work with nothing in flight;\n"
        "median of paired ratios [quartiles]. 'nothing, again' is the noise: twice the same.\n"
        "ended after: from the call of rank 1, which comes late, to the end of a named allreduce of 64 bytes on rank 0."
    )
    return "\n\n".join(parts)


def panels(found: dict[str, dict[str, Any]]) -> list[Bars]:
    """Slowdowns of all kinds of work, a panel for each place of the threads."""
    drawn = []
    for place, results in found.items():
        groups = list(results["slowdown"])
        series = {
            wait: [Summary.of(results["slowdown"][work][wait]).median for work in groups]
            for wait in (AGAIN, NAMED, PLANNED)
        }
        drawn.append(Bars(place, "time / time without waiting", groups, series, line=1.0))
    return drawn


def _ratio(samples: list[float]) -> str:
    summary = Summary.of(samples)
    return f"{summary.median:.3f} [{summary.first_quartile:.3f}, {summary.third_quartile:.3f}]"


def _times(samples: list[float]) -> tuple[str, str, str]:
    summary = Summary.of(samples)
    quartiles = f"{format_seconds(summary.first_quartile)}, {format_seconds(summary.third_quartile)}"
    return format_seconds(summary.median), quartiles, format_seconds(max(samples))


BENCHMARK = Benchmark(
    "waiting", "the slowdown of a computing rank by its own waiting, and how soon it wakes", add_arguments, run
)
