"""bench step: a training step with hvlike beside torch's DDP, Horovod, and the same step without communication."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import hvlike
from hvlike.bench import trainers
from hvlike.bench.bare import BareLoop
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.comparison import Contestant, Entrant, compare
from hvlike.bench.devices import cpu_only, where
from hvlike.bench.horovod_job import Elsewhere
from hvlike.bench.options import add_bare, add_common, add_device, left_out
from hvlike.bench.peers import Peers
from hvlike.bench.plot import draw
from hvlike.bench.step_report import Result, as_text, panels
from hvlike.bench.torch_group import backend_for
from hvlike.bench.trainers import ALONE, Trainer
from hvlike.bench.verification import expected_gradients, verify_gradients, verify_replicas
from hvlike.bench.workloads import DEFAULT, LARGE, WORKLOADS, Workload
from hvlike.transport.raw import RawMpi

# A turn is long enough to be told from noise; a model takes about so long in all.
_TURN_SECONDS = 0.04
_MODEL_SECONDS = 12.0
_FEWEST, _MOST = 7, 60
# The order is learned, buckets are laid out anew, and hvlike has tried two ways of reducing each.
_FIRST_STEPS = 10
_KNOWN = WORKLOADS | LARGE


def models(text: str) -> list[Workload]:
    """Return models from names separated by commas. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in _KNOWN:
            raise argparse.ArgumentTypeError(f"there is no model {name!r}; there are {', '.join(_KNOWN)}")
    return [_KNOWN[name] for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    default = ",".join(DEFAULT)
    known = ", ".join(_KNOWN)
    parser.add_argument("--models", type=models, default=models(default), help=f"of {known}; default {default}")
    add_bare(parser)
    parser.add_argument("--no-ddp", action="store_true", help="leave torch's DistributedDataParallel out")
    parser.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view, too")
    add_device(parser, "the model")
    add_common(parser, f"what takes about {_MODEL_SECONDS:.0f} s a model, {_FEWEST} to {_MOST}")


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective. Returns the exit status."""
    hvlike.init()
    device = hvlike.pin_device(options.device)
    with Peers(
        without_gloo=left_out(options.no_ddp, "--no-ddp"),
        without_horovod=left_out(options.no_horovod, "--no-horovod") or cpu_only(device),
        backend=backend_for(device),
    ) as peers:
        views = [] if peers.group is None else [False, True] if options.bucket_view else [False]
        workloads = [replace(each, device=device) for each in options.models]
        bare = BareLoop() if options.bare else None
        results = [measure(each, peers, views, options.repetitions, options.seed, bare) for each in workloads]
        if hvlike.rank() == 0:
            show(options, peers.describe("step") | where(device), results)
    hvlike.shutdown()
    return 0


def show(options: argparse.Namespace, conditions: dict[str, Any], results: list[Result]) -> None:
    """Print, and draw if that is wanted."""
    if options.json:
        print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
    else:
        print(as_text(conditions, results))
    if options.plot:
        draw(options.plot, f"training step on {hvlike.size()} ranks", panels(results))


def measure(
    workload: Workload,
    peers: Peers,
    views: Sequence[bool],
    repetitions: int | None,
    seed: int,
    bare: BareLoop | None = None,
) -> Result:
    """Measure one model. Collective. views: one contestant with DDP for each, with or without bucket views."""
    rank, raw = hvlike.rank(), peers.raw
    expected = expected_gradients(workload.model(seed), workload.data(seed + 1 + rank), raw)
    contestants = [trainers.alone(workload, seed, rank), trainers.ours(workload, seed, rank)]
    contestants.append(trainers.ours_ddp(workload, seed, rank))
    backend = peers.group.backend if peers.group is not None else ""
    contestants += [trainers.ddp(workload, seed, rank, view=view, backend=backend) for view in views]
    if bare is not None:
        contestants.append(trainers.barely(workload, seed, rank, bare))
    for trainer in contestants:
        trainer.step()
        if trainer.name != ALONE:
            verify_gradients(trainer, expected, rank)
        trainer.steps(_FIRST_STEPS - 1)
    del expected
    steps, affordable = _effort(contestants, raw)
    entered: list[Entrant] = [_contestant(each, steps) for each in contestants]
    if peers.horovod is not None:
        peers.horovod.ask({"work": "step", "cold": False, "model": workload.name, "seed": seed})
        entered.append(Elsewhere(peers.horovod, steps))
    seconds = compare(raw, entered, repetitions or affordable, warmups=1, seed=seed)
    for trainer in contestants[1:]:
        verify_replicas(trainer, raw)
    parameters = contestants[0].parameters
    return Result(
        workload.name,
        workload.purpose,
        len(parameters),
        sum(each.nbytes for each in parameters),
        steps,
        {name: [each / steps for each in samples] for name, samples in seconds.items()},
    )


def _contestant(trainer: Trainer, steps: int) -> Contestant:
    # A step before the clock starts brings the model back into the caches, as in a training that nobody interrupts.
    return Contestant(trainer.name, partial(trainer.steps, 1), partial(trainer.steps, steps))


def _effort(contestants: Sequence[Trainer], raw: RawMpi) -> tuple[int, int]:
    """Return the steps of a turn and how many repetitions there is time for, the same on all ranks."""
    taken = []
    for trainer in contestants:
        times = []
        for _ in range(3):
            raw.barrier()
            start = time.perf_counter()
            trainer.steps(1)
            times.append(time.perf_counter() - start)
        taken.append(statistics.median(times))
    floor, total = raw.maximum([taken[0], sum(taken)])
    steps = max(1, round(_TURN_SECONDS / floor))
    return steps, max(_FEWEST, min(_MOST, int(_MODEL_SECONDS / (total * (steps + 1)))))


BENCHMARK = Benchmark(
    "step", "a training step with hvlike beside torch's DDP, Horovod and no communication", add_arguments, run
)
