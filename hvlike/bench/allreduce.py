"""bench allreduce: hvlike.allreduce_ on an ordinary tensor beside MPI_Allreduce, gloo and the memory floor.

The floor is one pass over the same bytes that reads and writes each once, in place, on every rank at the same
time: no reduction in place of a tensor in ordinary memory can take less.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import hvlike
from hvlike.bench import gloo
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.comparison import Contestant, Summary, compare, paired_ratio
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size, parse_sizes
from hvlike.errors import HvlikeError
from hvlike.transport.raw import RawMpi

OURS = "hvlike"
MPI = "MPI_Allreduce"
GLOO = "gloo"
FLOOR = "memory floor"
SHORT = {MPI: "MPI", GLOO: "gloo"}

DEFAULT_SIZES = "1KiB,64KiB,1MiB,4MiB,25MiB,100MiB,400MiB"
_BYTES_PER_SIZE = 2 << 30
_FEWEST, _MOST = 9, 60


@dataclass(frozen=True)
class Result:
    """What came out for one size: seconds per repetition for each contestant, the slowest rank each time."""

    size: int
    seconds: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, float]:
        """Medians of paired ratios: others to hvlike (above 1: hvlike is faster), and hvlike to the floor."""
        found = {
            f"{SHORT[name]}/{OURS}": paired_ratio(self.seconds, name, OURS) for name in SHORT if name in self.seconds
        }
        return {**found, f"{OURS}/floor": paired_ratio(self.seconds, OURS, FLOOR)}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        summaries = {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.seconds.items()}
        return {"bytes": self.size, "seconds": summaries, "ratios": self.ratios}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes(DEFAULT_SIZES), help=f"bytes, default {DEFAULT_SIZES}"
    )
    parser.add_argument("--repetitions", type=int, help=f"default: {_MOST} for small sizes down to {_FEWEST}")
    parser.add_argument("--seed", type=int, default=0, help="draws the order of the contestants")
    parser.add_argument("--no-gloo", action="store_true", help="leave gloo out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective. Returns the exit status."""
    hvlike.init()
    raw = RawMpi()
    reason = "left out by --no-gloo" if options.no_gloo else gloo.unavailable()
    other = None if reason else gloo.Gloo()
    results = [
        measure(size, raw, other, options.repetitions or default_repetitions(size), options.seed)
        for size in options.sizes
    ]
    if hvlike.rank() == 0:
        conditions = describe(raw, reason)
        if options.json:
            print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
        else:
            print(as_text(conditions, results))
    if other is not None:
        other.close()
    raw.free()
    hvlike.shutdown()
    return 0


def default_repetitions(size: int) -> int:
    """Many for small sizes, fewer for those that take long."""
    return max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // max(size, 1)))


def measure(size: int, raw: RawMpi, other: gloo.Gloo | None, repetitions: int, seed: int) -> Result:
    """Measure one size. Collective."""
    tensor = torch.zeros(max(1, size // 4))
    array = tensor.numpy()
    total = sum(range(1, hvlike.size() + 1))

    def prepare() -> None:
        np.copyto(array, hvlike.rank() + 1)

    def check() -> None:
        if not (array == total).all():
            raise HvlikeError(f"rank {hvlike.rank()}: an allreduce of {size} bytes did not give {total} everywhere.")

    contestants = [
        Contestant(OURS, prepare, lambda: _reduce(tensor), check),
        Contestant(MPI, prepare, lambda: raw.allreduce(array), check),
    ]
    if other is not None:
        contestants.append(Contestant(GLOO, prepare, lambda: other.allreduce(tensor), check))
    contestants.append(Contestant(FLOOR, prepare, lambda: _pass_over(array), lambda: None))
    return Result(size, compare(raw, contestants, repetitions, seed=seed))


def _reduce(tensor: torch.Tensor) -> None:
    hvlike.allreduce_(tensor, op=hvlike.Sum, name=f"bench.{tensor.numel()}")


def _pass_over(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    np.multiply(array, np.float32(1.5), out=array)


def describe(raw: RawMpi, without_gloo: str | None) -> dict[str, Any]:
    """The conditions of the run."""
    return {
        "benchmark": "allreduce",
        "dtype": "float32",
        "ranks": hvlike.size(),
        "nodes": hvlike.size() // hvlike.local_size() if hvlike.is_homogeneous() else "uneven",
        "hvlike": hvlike.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "mpi": raw.library,
        "without_gloo": without_gloo,
    }


def as_text(conditions: dict[str, Any], results: list[Result]) -> str:
    """The table with its head and foot."""
    names = list(results[0].seconds)
    ratios = list(results[0].ratios)
    rows = []
    for result in results:
        cells = [format_size(result.size), str(len(result.seconds[OURS]))]
        for name in names:
            summary = Summary.of(result.seconds[name])
            spread = (summary.third_quartile - summary.first_quartile) / summary.median
            cells.append(f"{format_seconds(summary.median)} [{spread:.0%}]")
        rows.append([*cells, *(f"{result.ratios[name]:.2f}" for name in ratios)])
    head = (
        f"allreduce of one float32 tensor, in place, {conditions['ranks']} ranks on {conditions['nodes']} node(s)\n"
        f"hvlike {conditions['hvlike']}, torch {conditions['torch']}, "
        f"Python {conditions['python']}, {conditions['mpi']}"
    )
    foot = (
        "Times: median over repetitions of the slowest rank, cold caches [interquartile range].\n"
        "Ratios: median of ratios within one repetition."
    )
    if conditions["without_gloo"]:
        foot += f"\nWithout gloo: {conditions['without_gloo']}."
    return f"{head}\n\n{table(['size', 'n', *names, *ratios], rows)}\n\n{foot}"


BENCHMARK = Benchmark(
    "allreduce", "hvlike.allreduce_ beside MPI_Allreduce, gloo and the memory floor", add_arguments, run
)
