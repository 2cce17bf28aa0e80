"""bench allreduce: hvlike.allreduce_ of ordinary and of shared tensors beside MPI, gloo, Horovod and two floors.

The floor is one pass over the same bytes that reads and writes each once, in place, on every rank at the same
time: no reduction in place of a tensor in ordinary memory can take less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import hvlike
from hvlike.bench.harness.benchmark import (
    Benchmark,
    add_bare_and_device,
    add_common,
    choice_of,
    heading,
    left_out,
)
from hvlike.bench.harness.comparison import Entrant, Ratio, Summary, compare, with_samples
from hvlike.bench.harness.report import (
    Bars,
    Curves,
    format_size,
    parse_sizes,
    publish,
    ratio_cell,
    table,
    with_spread,
)
from hvlike.bench.peers import HorovodEntrant, Peers
from hvlike.bench.reducers import (
    BARE,
    COPY,
    DTYPES,
    FLOOR,
    GLOO,
    HOROVOD,
    MPI,
    NCCL,
    OURS,
    SHARED,
    SHARED_FLOOR,
    BareLoop,
    Case,
    contestants,
    contestants_on_gpu,
)
from hvlike.errors import UsageError

RATIOS = {
    "MPI/hvlike": (MPI, OURS),
    "gloo/hvlike": (GLOO, OURS),
    "NCCL/hvlike": (NCCL, OURS),
    "Horovod/hvlike": (HOROVOD, OURS),
    "MPI/bare": (MPI, BARE),
    "hvlike/bare": (OURS, BARE),
    "hvlike/pass": (OURS, FLOOR),
    "hvlike/memcpy": (OURS, COPY),
    "MPI/shared": (MPI, SHARED),
    "shared/pass": (SHARED, FLOOR),
    "shared/own pass": (SHARED, SHARED_FLOOR),
}
"""Above 1 where others come first: hvlike is faster; where hvlike comes first: how far it is from the floor."""


@dataclass(frozen=True)
class Result:
    """The result for one size: for each contestant the seconds of each repetition, of the slowest rank."""

    dtype: str
    size: int
    seconds: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Those of RATIOS whose contestants took part."""
        return {
            name: Ratio.of(self.seconds, above, below)
            for name, (above, below) in RATIOS.items()
            if above in self.seconds and below in self.seconds
        }

    def as_json(self) -> dict[str, Any]:
        """Return the result for JSON."""
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"dtype": self.dtype, "bytes": self.size, "seconds": with_samples(self.seconds), "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """Return two tables for each dtype, times and ratios, with head and foot."""
    parts = [f"allreduce of one tensor, op {conditions['op']}, in place, {heading(conditions)}"]
    for dtype, found in by_dtype(results).items():
        names, ratios = list(found[0].seconds), list(found[0].ratios)
        parts.append(table([dtype, "n", *names], [_times(result, names) for result in found]))
        parts.append(table([f"{dtype} ratios", *ratios], [_ratios(result, ratios) for result in found]))
    foot = (
        f"Times: median over repetitions of the slowest rank, {conditions['caches']} caches [interquartile range].\n"
        "Ratios: of medians [quartiles of the ratios within one repetition]. A pass reads and writes every byte once,\n"
        "in place; memcpy into other memory; both on all ranks at once. shared: the tensor is from hvlike.empty_shared."
    )
    if any(result.dtype in ("float16", "bfloat16") for result in results):
        foot += f"\n{MPI} adds no 16-bit floats: it reduces the same values in float32."
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result]) -> list[Bars | Curves]:
    """Times over size and ratios as bars, for each dtype."""
    drawn: list[Bars | Curves] = []
    for dtype, found in by_dtype(results).items():
        sizes = [float(result.size) for result in found]
        labels = [format_size(result.size) for result in found]
        times = {name: [Summary.of(result.seconds[name]).median for result in found] for name in found[0].seconds}
        ratios = {name: [result.ratios[name].of_medians for result in found] for name in found[0].ratios}
        others = {name: each for name, each in ratios.items() if RATIOS[name][1] in (OURS, SHARED, BARE)}
        floors = {name: each for name, each in ratios.items() if name not in others}
        drawn += [
            Curves(f"{dtype}: time", "size", "seconds", sizes, times, labels),
            Bars(f"{dtype}: how many times faster", "ratio", labels, others, line=1.0, logarithmic=True),
            Bars(f"{dtype}: times the floor", "ratio", labels, floors, line=1.0, logarithmic=True),
        ]
    return drawn


def by_dtype(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results in groups, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.dtype, []).append(result)
    return groups


def _times(result: Result, names: Sequence[str]) -> list[str]:
    cells = [with_spread(Summary.of(result.seconds[name])) for name in names]
    return [format_size(result.size), str(len(result.seconds[OURS])), *cells]


def _ratios(result: Result, names: Sequence[str]) -> list[str]:
    return [format_size(result.size), *(ratio_cell(result.ratios[name]) for name in names)]


DEFAULT_SIZES = "1KiB,64KiB,1MiB,4MiB,25MiB,100MiB,400MiB"
_BYTES_PER_SIZE = 2 << 30
_FEWEST, _MOST = 9, 60
_WARM_UPS = 3
# Turns that do not count.
_FIRST_TURNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes(DEFAULT_SIZES), help=f"bytes, default {DEFAULT_SIZES}"
    )
    known, dtypes = ", ".join(DTYPES), choice_of(DTYPES, "dtype")
    parser.add_argument("--dtypes", type=dtypes, default=[torch.float32], help=f"of {known}; default float32")
    parser.add_argument(
        "--op", choices=("sum", "average"), default="sum", help="what all compute, those without average sum and divide"
    )
    parser.add_argument("--warm", action="store_true", help="with warm caches, as in a loop; default: with cold ones")
    parser.add_argument("--no-gloo", action="store_true", help="leave gloo out")
    add_bare_and_device(parser, "the tensor")
    add_common(parser, f"{_MOST} for small sizes down to {_FEWEST}")


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective. Returns the exit status."""
    if options.op == "average" and not all(each.is_floating_point for each in options.dtypes):
        raise UsageError("--op average is for floating dtypes: an average of integers has no single meaning.")
    hvlike.init()
    device = hvlike.pin_device(options.device)
    with Peers(
        without_gloo=left_out(options.no_gloo, "--no-gloo"),
        without_horovod=left_out(options.no_horovod, "--no-horovod"),
        device=device,
    ) as peers:
        bare = BareLoop() if options.bare else None
        results = [
            measure(Case(size, dtype, options.op == "average"), peers, options, bare)
            for dtype in options.dtypes
            for size in options.sizes
        ]
        if hvlike.rank() == 0:
            conditions = peers.describe("allreduce")
            conditions |= {"op": options.op, "caches": "warm" if options.warm else "cold"}
            document = {**conditions, "results": [each.as_json() for each in results]}
            title = f"allreduce, op {options.op}, {hvlike.size()} ranks"
            publish(options, document, as_text(conditions, results), title, panels(results))
    hvlike.shutdown()
    return 0


def default_repetitions(size: int) -> int:
    """Many for small sizes, fewer for those that take long."""
    return max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // max(size, 1)))


def measure(case: Case, peers: Peers, options: argparse.Namespace, bare: BareLoop | None) -> Result:
    """Measure one size of one dtype. Collective."""
    if peers.device.type == "cpu":
        here = contestants(case, peers.raw, peers.group, bare)
    else:
        here = contestants_on_gpu(case, peers.device, peers.group)
    entered: list[Entrant] = [each.warmed(_WARM_UPS) if options.warm else each for each in here]
    if peers.horovod is not None:
        what = {"size": case.size, "dtype": case.dtype_name, "average": case.average}
        peers.horovod.ask({"work": "allreduce", "cold": not options.warm, **what})
        entered.append(HorovodEntrant(peers.horovod))
    count = options.repetitions or default_repetitions(case.size)
    found = compare(peers.raw, entered, count, warmups=_FIRST_TURNS, seed=options.seed, cold=not options.warm)
    return Result(case.dtype_name, case.size, found)


BENCHMARK = Benchmark(
    "allreduce", "hvlike.allreduce_ beside MPI_Allreduce, gloo, Horovod and the floors of memory", add_arguments, run
)
