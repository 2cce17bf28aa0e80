"""bench rpc: calls between two ranks by hvlike.rpc, beside torch.distributed.rpc over TensorPipe and plain MPI."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc as torch_rpc

import hvlike
from hvlike import rpc
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.conditions import describe
from hvlike.bench.options import add_common, left_out
from hvlike.bench.plot import draw
from hvlike.bench.rpc_floor import Floor
from hvlike.bench.rpc_pair import Pair
from hvlike.bench.rpc_report import MPI, OURS, TENSORPIPE, Result, as_text, panels
from hvlike.bench.rpc_work import Idle, Rate, Trip, Work
from hvlike.bench.sizes import parse_sizes
from hvlike.errors import LaunchError
from hvlike.transport.raw import RawMpi

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
    hvlike.init()
    if hvlike.size() != 2:
        if hvlike.rank() == 0:
            print("bench rpc is for two ranks: mpirun -n 2 python -m hvlike bench rpc", file=sys.stderr)
        hvlike.shutdown()
        return 2
    raw = RawMpi()
    conditions = describe("rpc", raw)
    raw.free()
    cores = hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.rpc.cores")
    rpc.init_rpc(f"worker{hvlike.rank()}")
    floor = Floor()
    if hvlike.rank() == 0:
        compare(options, conditions, cores, floor)
        floor.end()
    else:
        floor.wait()
    floor.close()
    rpc.shutdown()
    hvlike.shutdown()
    return 0


def compare(
    options: argparse.Namespace, conditions: dict[str, Any], cores: Sequence[Sequence[int]], floor: Floor
) -> None:
    """Measure everything with all contestants and show it. On rank 0, while the main thread of rank 1 sleeps."""
    contestants = [Contestant(OURS, lambda work: work.measure(rpc)), Contestant(MPI, floor.measure, Trip)]
    pair = start_pair(cores, left_out(options.no_tensorpipe, "--no-tensorpipe"))
    if isinstance(pair, Pair):
        contestants.append(Contestant(TENSORPIPE, pair.measure))
        reasons = []
    else:
        reasons = [f"Without {TENSORPIPE}: {pair}."]
    try:
        results = measure(options, contestants)
    finally:
        if isinstance(pair, Pair):
            pair.close()
    show(options, {**conditions, "left_out": reasons}, results)


def start_pair(cores: Sequence[Sequence[int]], without: str | None) -> Pair | str:
    """Start TensorPipe's processes, or return why it takes no part."""
    if without is not None:
        return without
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its processes here are on one"
    if not torch_rpc.is_available():
        return "this torch was built without it"
    try:
        return Pair(cores)
    except (LaunchError, OSError) as error:
        return str(error)


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
