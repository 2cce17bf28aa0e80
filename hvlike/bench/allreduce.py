"""bench allreduce: hvlike.allreduce_ of ordinary and of shared tensors beside MPI, gloo, Horovod and two floors.

The floor is one pass over the same bytes that reads and writes each once, in place, on every rank at the same
time: no reduction in place of a tensor in ordinary memory can take less.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import hvlike
from hvlike.bench import reducers
from hvlike.bench.allreduce_report import Result, as_text, panels
from hvlike.bench.bare import BareLoop
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.comparison import Entrant, compare
from hvlike.bench.devices import cpu_only, where
from hvlike.bench.horovod_job import Elsewhere
from hvlike.bench.options import add_bare, add_common, add_device, left_out
from hvlike.bench.peers import Peers
from hvlike.bench.plot import draw
from hvlike.bench.reducers import Case
from hvlike.bench.sizes import parse_sizes
from hvlike.bench.torch_group import backend_for
from hvlike.errors import UsageError
from hvlike.planes.at_once import MOST_STAGED

DEFAULT_SIZES = "1KiB,64KiB,1MiB,4MiB,25MiB,100MiB,400MiB"
_BYTES_PER_SIZE = 2 << 30
_FEWEST, _MOST = 9, 60
_WARM_UPS = 3
# Turns that do not count. Of large tensors hvlike tries two ways at first.
_FIRST_TURNS, _SETTLING = 2, 10


def dtypes(text: str) -> list[torch.dtype]:
    """Return dtypes from names separated by commas. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in reducers.DTYPES:
            known = ", ".join(reducers.DTYPES)
            raise argparse.ArgumentTypeError(f"{name!r} is not measured; these are: {known}")
    return [reducers.DTYPES[name] for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes(DEFAULT_SIZES), help=f"bytes, default {DEFAULT_SIZES}"
    )
    known = ", ".join(reducers.DTYPES)
    parser.add_argument("--dtypes", type=dtypes, default=[torch.float32], help=f"of {known}; default float32")
    parser.add_argument(
        "--op", choices=("sum", "average"), default="sum", help="what all compute, those without average sum and divide"
    )
    parser.add_argument("--warm", action="store_true", help="with warm caches, as in a loop; default: with cold ones")
    add_bare(parser)
    parser.add_argument("--no-gloo", action="store_true", help="leave gloo out")
    add_device(parser, "the tensor")
    add_common(parser, f"{_MOST} for small sizes down to {_FEWEST}")


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective. Returns the exit status."""
    if options.op == "average" and not all(each.is_floating_point for each in options.dtypes):
        raise UsageError("--op average is for floating dtypes: an average of integers has no single meaning.")
    hvlike.init()
    device = hvlike.pin_device(options.device)
    with Peers(
        without_gloo=left_out(options.no_gloo, "--no-gloo"),
        without_horovod=left_out(options.no_horovod, "--no-horovod") or cpu_only(device),
        backend=backend_for(device),
    ) as peers:
        bare = BareLoop() if options.bare else None
        results = [
            measure(Case(size, dtype, options.op == "average"), device, peers, options, bare)
            for dtype in options.dtypes
            for size in options.sizes
        ]
        if hvlike.rank() == 0:
            show(options, peers.describe("allreduce") | where(device), results)
    hvlike.shutdown()
    return 0


def show(options: argparse.Namespace, conditions: dict[str, Any], results: list[Result]) -> None:
    """Print, and draw if that is wanted."""
    conditions |= {"op": options.op, "caches": "warm" if options.warm else "cold"}
    if options.json:
        print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
    else:
        print(as_text(conditions, results))
    if options.plot:
        draw(options.plot, f"allreduce, op {options.op}, {hvlike.size()} ranks", panels(results))


def default_repetitions(size: int) -> int:
    """Many for small sizes, fewer for those that take long."""
    return max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // max(size, 1)))


def measure(
    case: Case, device: torch.device, peers: Peers, options: argparse.Namespace, bare: BareLoop | None
) -> Result:
    """Measure one size of one dtype. Collective."""
    if device.type == "cpu":
        here = reducers.contestants(case, peers.raw, peers.group, bare)
    else:
        here = reducers.contestants_on_gpu(case, device, peers.group)
    entered: list[Entrant] = [each.warmed(_WARM_UPS) if options.warm else each for each in here]
    if peers.horovod is not None:
        what = {"size": case.size, "dtype": case.dtype_name, "average": case.average}
        peers.horovod.ask({"work": "allreduce", "cold": not options.warm, **what})
        entered.append(Elsewhere(peers.horovod))
    count = options.repetitions or default_repetitions(case.size)
    warmups = _SETTLING if case.size > MOST_STAGED else _FIRST_TURNS
    found = compare(peers.raw, entered, count, warmups=warmups, seed=options.seed, cold=not options.warm)
    return Result(case.dtype_name, case.size, found)


BENCHMARK = Benchmark(
    "allreduce", "hvlike.allreduce_ beside MPI_Allreduce, gloo, Horovod and the floors of memory", add_arguments, run
)
