"""bench kernels: what every host backend adds with, beside torch.add and np.add, with one thread and with more.

All ranks add at the same time, each its own piece and one received, in place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvlike
from hvlike.backends.arithmetic.arithmetic import THREADS, Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.bench import allreduce
from hvlike.bench.harness.benchmark import add_common, choice_of, describe, heading, positives
from hvlike.bench.harness.comparison import Contestant, Ratio, Summary, compare, ratios_of
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.harness.report import Curves, parse_sizes, publish, ratio_cell, table, with_spread
from hvlike.bench.reducers import DTYPES
from hvlike.errors import HvlikeError
from hvlike.observe.printing import format_size
from hvlike.transport.memory.dtypes import dtype_name, raw_view

PURPOSE = "additions on the host with one thread and more"

OURS, TORCH, NUMPY = "hvlike", "torch.add", "np.add"
_REPETITIONS = 40
_WARM_UPS = 3


class Result(allreduce.AllreduceResult):
    @property
    def ratios(self) -> dict[str, Ratio]:
        """Of hvlike with more threads to hvlike with the fewest."""
        first, *more = (name for name in self.seconds if name.startswith(OURS))
        return ratios_of(self.seconds, {f"{name} / {first}": (name, first) for name in more})


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    parts = [f"addition of two pieces, in place, {heading(conditions)}, {conditions['usable']:g} cores a rank"]
    for dtype in dict.fromkeys(each.dtype for each in results):
        found = [each for each in results if each.dtype == dtype]
        names, pairs = list(found[0].seconds), list(found[0].ratios)
        rows = []
        for each in found:
            times = (with_spread(Summary.of(each.seconds[name])) for name in names)
            rows.append([format_size(each.size), *times, *(ratio_cell(each.ratios[pair]) for pair in pairs)])
        parts.append(table([dtype, *names, *pairs], rows))
    parts.append(
        f"Times: median over repetitions of the slowest rank, {conditions['caches']} caches [interquartile range].\n"
        "hvlike adds with torch's threads from 2 MiB on, where the rank has a core for each."
    )
    return "\n\n".join(parts)


def panels(results: Sequence[Result]) -> list[Curves]:
    drawn = []
    for dtype in dict.fromkeys(each.dtype for each in results):
        found = [each for each in results if each.dtype == dtype]
        times = {name: [Summary.of(each.seconds[name]).median for each in found] for name in found[0].seconds}
        labels = [format_size(each.size) for each in found]
        drawn.append(Curves(dtype, "size", "seconds", [float(each.size) for each in found], times, labels))
    return drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=parse_sizes, default="64KiB,1MiB,4MiB,16MiB", help="bytes, default %(default)s")
    dtypes, known = choice_of(DTYPES, "dtype"), ", ".join(DTYPES)
    parser.add_argument("--dtypes", type=dtypes, default=list(DTYPES.values()), help=f"of {known}; default: all")
    parser.add_argument("--threads", type=positives, default=[1, 2], help="of torch, default 1,2")
    parser.add_argument("--warm", action="store_true", help="with warm caches and threads awake; default: neither")
    add_common(parser, str(_REPETITIONS))


def contestants(dtype: torch.dtype, size: int, threads: Sequence[int]) -> list[Contestant]:
    """All that add: each with each number of threads, numpy with its one, if it knows the dtype."""
    elements = size // dtype.itemsize
    start, other = (torch.arange(elements).remainder(factor).to(dtype) for factor in (101, 89))
    own, expected = torch.empty_like(start), start + other
    arithmetic = Arithmetic(dtype, ReduceOp.SUM)
    mine, received = arithmetic.view(own), arithmetic.view(other)

    def entered(name: str, count: int, run: Callable[[], object]) -> Contestant:
        def prepare() -> None:
            torch.set_num_threads(count)
            raw_view(own)[...] = raw_view(start)  # By numpy: torch's threads sleep on

        def verify() -> None:
            if not torch.equal(own, expected):
                raise HvlikeError(f"{name} computed a wrong sum of {elements} elements of {dtype_name(dtype)}.")

        return Contestant(name, prepare, run, verify)

    found = []
    for count in threads:
        found.append(entered(f"{OURS}, {count}", count, lambda: arithmetic.combine(mine, [received])))
        found.append(entered(f"{TORCH}, {count}", count, lambda: torch.add(own, other, out=own)))
    if dtype.itemsize > 2:
        found.append(entered(NUMPY, 1, lambda: own.numpy().__iadd__(other.numpy())))
    return found


def run(options: argparse.Namespace) -> int:
    hvlike.init()
    raw, before, results = RawMpi(), torch.get_num_threads(), []
    for dtype in options.dtypes:
        for size in options.sizes:
            entered = contestants(dtype, size, options.threads)
            if options.warm:
                entered = [each.warmed(_WARM_UPS) for each in entered]
            count = options.repetitions or _REPETITIONS
            found = compare(raw, entered, count, warmups=_WARM_UPS, seed=options.seed, cold=not options.warm)
            results.append(Result(dtype_name(dtype), size, found))
    torch.set_num_threads(before)
    if hvlike.rank() == 0:
        conditions = {**describe("kernels"), "usable": THREADS.cores, "caches": "warm" if options.warm else "cold"}
        document = {**conditions, "results": [each.as_json() for each in results]}
        publish(options, document, as_text(conditions, results), f"additions, {hvlike.size()} ranks", panels(results))
    raw.free()
    hvlike.shutdown()
    return 0
