"""bench allreduce: hvlike.allreduce_ of ordinary and of shared tensors beside MPI, gloo, Horovod and two floors.

The floor is one pass over the same bytes that reads and writes each once, in place, on every rank at the same
time: no reduction in place of a tensor in ordinary memory can take less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

import hvlike
from hvlike.bench.harness.benchmark import add_bare_and_device, add_common, choice_of, heading
from hvlike.bench.harness.comparison import Ratio, Summary, compare, ratios_of, with_samples
from hvlike.bench.harness.report import Bars, Curves, parse_sizes, publish, ratio_cell, table, with_spread
from hvlike.bench.peers import Peers, peers
from hvlike.bench.reducers import (
    BARE,
    DTYPES,
    EXCHANGE,
    EXCHANGE_MEANS,
    MPI,
    OURS,
    RATIOS,
    SHARED,
    BareLoop,
    BenchTensor,
    contestants,
)
from hvlike.errors import UsageError
from hvlike.observe.printing import format_size

PURPOSE = "hvlike.allreduce_ beside MPI, gloo, Horovod and floors of memory"

DEFAULT_SIZES = "1KiB,64KiB,1MiB,4MiB,25MiB,100MiB,400MiB"
_BYTES_PER_SIZE = 2 << 30
_FEWEST, _MOST = 9, 60
_WARM_UPS = 3
_FIRST_TURNS = 5  # Those that do not count


@dataclass(frozen=True)
class AllreduceResult:
    """The result for one size: for each contestant the seconds of each repetition, of the slowest rank."""

    dtype: str
    size: int
    seconds: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Ratio]:
        return ratios_of(self.seconds, RATIOS)

    def as_json(self) -> dict[str, Any]:
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"dtype": self.dtype, "bytes": self.size, "seconds": with_samples(self.seconds), "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[AllreduceResult]) -> str:
    parts = [f"allreduce of one tensor, op {conditions['op']}, in place, {heading(conditions)}"]
    for dtype, group in groupby(results, lambda each: each.dtype):
        found = list(group)
        names, ratios = list(found[0].seconds), list(found[0].ratios)
        times, rows = [], []
        for each in found:
            size = format_size(each.size)
            medians = (with_spread(Summary.of(each.seconds[name])) for name in names)
            times.append([size, str(len(each.seconds[OURS])), *medians])
            rows.append([size, *(ratio_cell(each.ratios[name]) for name in ratios)])
        parts += [table([dtype, "n", *names], times), table([f"{dtype} ratios", *ratios], rows)]
    foot = (
        f"Times: median over repetitions of the slowest rank, {conditions['caches']} caches [interquartile range].\n"
        "Ratios: of medians [quartiles of the ratios within one repetition]. A pass reads and writes every byte once,\n"
        "in place; memcpy into other memory; both on all ranks at once. shared: the tensor is from hvlike.empty_shared."
    )
    if any(EXCHANGE in result.seconds for result in results):
        foot += f"\n{EXCHANGE_MEANS}"
    if any(result.dtype in ("float16", "bfloat16") for result in results):
        foot += f"\n{MPI} adds no 16-bit floats: it reduces the same values in float32."
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[AllreduceResult]) -> list[Bars | Curves]:
    drawn: list[Bars | Curves] = []
    for dtype, group in groupby(results, lambda each: each.dtype):
        found = list(group)
        sizes = [float(result.size) for result in found]
        labels = [format_size(result.size) for result in found]
        times = {name: [Summary.of(result.seconds[name]).median for result in found] for name in found[0].seconds}
        ratios = {name: [result.ratios[name].bar for result in found] for name in found[0].ratios}
        others = {name: each for name, each in ratios.items() if RATIOS[name][1] in (OURS, SHARED, BARE)}
        floors = {name: each for name, each in ratios.items() if name not in others}
        drawn += [
            Curves(f"{dtype}: time", "size", "seconds", sizes, times, labels),
            Bars(f"{dtype}: how many times faster", "ratio", labels, others, line=1.0, logarithmic=True),
            Bars(f"{dtype}: times the floor", "ratio", labels, floors, line=1.0, logarithmic=True),
        ]
    return drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=parse_sizes, default=DEFAULT_SIZES, help="bytes, default %(default)s")
    known, dtypes = ", ".join(DTYPES), choice_of(DTYPES, "dtype")
    parser.add_argument("--dtypes", type=dtypes, default=[torch.float32], help=f"of {known}; default float32")
    op = "what all compute, those without average sum and divide; default sum"
    parser.add_argument("--op", choices=("sum", "average"), default="sum", help=op)
    parser.add_argument("--warm", action="store_true", help="with warm caches, as in a loop; default: with cold ones")
    add_bare_and_device(parser, "the tensor")
    add_common(parser, f"{_MOST} for small sizes down to {_FEWEST}", "gloo", "Horovod")


def run(options: argparse.Namespace) -> int:
    if options.op == "average" and not all(each.is_floating_point for each in options.dtypes):
        raise UsageError("--op average is for floating dtypes: an average of integers has no single meaning.")
    with peers(options.no_gloo, options.no_horovod, options.device) as there:
        bare = BareLoop() if options.bare else None
        cases = [
            BenchTensor(size, dtype, options.op == "average") for dtype in options.dtypes for size in options.sizes
        ]
        results = [measure(case, there, options, bare) for case in cases]
        if hvlike.rank() == 0:
            conditions = there.describe("allreduce")
            conditions |= {"op": options.op, "caches": "warm" if options.warm else "cold"}
            document = {**conditions, "results": [each.as_json() for each in results]}
            title = f"allreduce, op {options.op}, {hvlike.size()} ranks"
            publish(options, document, as_text(conditions, results), title, panels(results))
    return 0


def default_repetitions(size: int) -> int:
    return max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // max(size, 1)))


def measure(case: BenchTensor, there: Peers, options: argparse.Namespace, bare: BareLoop | None) -> AllreduceResult:
    entered = contestants(case, there.device, there.raw, there.backend, bare)
    if options.warm:
        entered = [each.warmed(_WARM_UPS) for each in entered]
    if there.horovod is not None:
        what = {"size": case.size, "dtype": case.dtype_name, "average": case.average}
        there.horovod.ask({"work": "allreduce", "cold": not options.warm, **what})
        entered.append(there.horovod.contestant())
    count = options.repetitions or default_repetitions(case.size)
    found = compare(there.raw, entered, count, warmups=_FIRST_TURNS, seed=options.seed, cold=not options.warm)
    return AllreduceResult(case.dtype_name, case.size, found)
