"""bench rpc: calls between two ranks by hvlike.rpc, beside torch.distributed.rpc over TensorPipe and plain MPI."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hvlike
from hvlike import rpc
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.conditions import runs_on_two_ranks
from hvlike.bench.options import add_common, left_out
from hvlike.bench.plot import draw
from hvlike.bench.rpc_floor import Floor
from hvlike.bench.rpc_pair import Pair
from hvlike.bench.rpc_report import MPI, OURS, TENSORPIPE, Result, as_text, panels
from hvlike.bench.rpc_session import Setting, let_rank_0_end, session, tensorpipe
from hvlike.bench.rpc_work import Idle, Rate, Trip, Work
from hvlike.bench.sizes import parse_sizes

DEFAULT_SIZES = "1KiB,4MiB,256MiB"
IN_FLIGHT = (1, 64)
_ROUNDS = 9


@dataclass(frozen=True)
class Contestant:
    """One way to call; `measure` does some work once, on rank 0, and returns its samples."""

    name: str
    measure: Callable[[Work], list[float]]
    only: type | None = None
    """The kind of work that it takes part in; None: all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes(DEFAULT_SIZES), help=f"bytes, default {DEFAULT_SIZES}"
    )
    parser.add_argument(
        "--idle", type=float, default=2.0, metavar="SECONDS", help="to watch an idle pair; default %(default)s"
    )
    parser.add_argument("--no-tensorpipe", action="store_true", help="leave torch.distributed.rpc out")
    add_common(parser, f"{_ROUNDS} turns of each, a third of them idle", horovod=False)


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective; two ranks. Returns the exit status."""
    if not runs_on_two_ranks("rpc"):
        return 2
    with session("rpc") as setting:
        floor = Floor()
        if hvlike.rank() == 0:
            compare(options, setting, floor)
        let_rank_0_end()
        floor.close()
    return 0


def compare(options: argparse.Namespace, setting: Setting, floor: Floor) -> None:
    """Measure everything with all contestants and show it. On rank 0, while the main thread of rank 1 sleeps."""
    contestants = [Contestant(OURS, lambda work: work.measure(rpc)), Contestant(MPI, floor.measure, Trip)]
    reasons = []
    with tensorpipe(setting.cores, left_out(options.no_tensorpipe, "--no-tensorpipe")) as pair:
        if isinstance(pair, Pair):
            contestants.append(Contestant(TENSORPIPE, pair.measure))
        else:
            reasons.append(f"Without {TENSORPIPE}: {pair}.")
        results = measure(options, contestants)
    show(options, {**setting.conditions, "left_out": reasons}, results)


def measure(options: argparse.Namespace, contestants: Sequence[Contestant]) -> list[Result]:
    """Every work in rounds: in each round all contestants have a turn, in random order. A first round does not count.

    The sample of a turn is the median of what it has timed.
    """
    order = random.Random(options.seed)
    rounds = options.repetitions or _ROUNDS
    works: list[Work] = [Trip(0), *map(Trip, options.sizes), *map(Rate, IN_FLIGHT), Idle(options.idle)]
    results = []
    for work in works:
        playing = [each for each in contestants if each.only is None or isinstance(work, each.only)]
        samples: dict[str, list[list[float]]] = {each.name: [] for each in playing}
        idle = isinstance(work, Idle)
        for turn in range(-(-rounds // 3) if idle else rounds + 1):
            for each in order.sample(playing, len(playing)):
                found = each.measure(work)
                if idle:
                    samples[each.name].append(found)
                elif turn:
                    samples[each.name].append([statistics.median(found)])
        results.append(Result(work, samples))
    return results


def show(options: argparse.Namespace, conditions: dict[str, Any], results: list[Result]) -> None:
    """Print what was found, and draw it."""
    if options.json:
        print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
    else:
        print(as_text(conditions, results))
    if options.plot:
        draw(options.plot, "remote calls between two ranks", panels(results))


BENCHMARK = Benchmark("rpc", "calls by hvlike.rpc beside torch.distributed.rpc and plain MPI", add_arguments, run)
