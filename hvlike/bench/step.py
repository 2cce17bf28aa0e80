"""bench step: a training step with hvlike beside torch's DDP and beside the same step without communication."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import hvlike
from hvlike.bench import gloo, trainers
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.comparison import Contestant, Summary, compare
from hvlike.bench.conditions import describe, heading
from hvlike.bench.overhead import Ratio, overhead_ratio, overheads, relative
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size
from hvlike.bench.trainers import ALONE, OURS, Trainer
from hvlike.bench.verification import expected_gradients, verify_gradients, verify_replicas
from hvlike.bench.workloads import DEFAULT, WORKLOADS, Workload
from hvlike.errors import UsageError
from hvlike.transport.raw import RawMpi

# A turn is long enough to be told from noise; a model takes about so long in all.
_TURN_SECONDS = 0.04
_MODEL_SECONDS = 12.0
_FEWEST, _MOST = 7, 60


@dataclass(frozen=True)
class Result:
    """What came out for one model: seconds of a step per repetition for each contestant, the slowest rank each time."""

    workload: Workload
    tensors: int
    size: int
    """Bytes of all gradients."""
    steps: int
    """Steps in a row whose mean is one repetition."""
    seconds: dict[str, list[float]]

    @property
    def overheads(self) -> dict[str, list[float]]:
        """Seconds above the floor of the same repetition, of all but the floor."""
        floor = self.seconds[ALONE]
        return {name: overheads(each, floor) for name, each in self.seconds.items() if name != ALONE}

    @property
    def ratios(self) -> dict[str, Ratio | None]:
        """hvlike's overhead as a part of each other contestant's."""
        found = self.overheads
        return {f"{OURS}/{name}": overhead_ratio(found[OURS], found[name]) for name in found if name != OURS}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        floor = self.seconds[ALONE]
        return {
            "model": self.workload.name,
            "tensors": self.tensors,
            "bytes": self.size,
            "steps": self.steps,
            "seconds": {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.seconds.items()},
            "overhead": {name: asdict(Summary.of(each)) for name, each in self.overheads.items()},
            "relative": {name: asdict(relative(self.seconds[name], floor)) for name in self.overheads},
            "ratios": {name: asdict(each) if each else None for name, each in self.ratios.items()},
        }


def models(text: str) -> list[Workload]:
    """Return models from names separated by commas. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"there is no model {name!r}; there are {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--models",
        type=models,
        default=models(",".join(DEFAULT)),
        help=f"of {', '.join(WORKLOADS)}; default {','.join(DEFAULT)}",
    )
    parser.add_argument("--repetitions", type=int, help=f"default: what takes {_MODEL_SECONDS:.0f} s a model")
    parser.add_argument("--seed", type=int, default=0, help="draws weights, data and the order of the contestants")
    parser.add_argument("--no-ddp", action="store_true", help="leave torch's DistributedDataParallel out")
    parser.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective. Returns the exit status."""
    hvlike.init()
    raw = RawMpi()
    reason = "left out by --no-ddp" if options.no_ddp else gloo.unavailable()
    group = None if reason else gloo.Gloo()
    views = [] if group is None else [False, True] if options.bucket_view else [False]
    results = [measure(each, raw, views, options.repetitions, options.seed) for each in options.models]
    if hvlike.rank() == 0:
        conditions = {**describe("step", raw), "without_ddp": reason}
        if options.json:
            print(json.dumps({**conditions, "results": [each.as_json() for each in results]}))
        else:
            print(as_text(conditions, results))
    if group is not None:
        group.close()
    raw.free()
    hvlike.shutdown()
    return 0


def measure(workload: Workload, raw: RawMpi, views: Sequence[bool], repetitions: int | None, seed: int) -> Result:
    """Measure one model. Collective. views: one contestant with DDP for each, with or without bucket views."""
    rank = hvlike.rank()
    expected = expected_gradients(workload.model(seed), workload.data(seed + 1 + rank), raw)
    contestants = [trainers.alone(workload, seed, rank), trainers.ours(workload, seed, rank)]
    contestants += [trainers.ddp(workload, seed, rank, view=view) for view in views]
    for trainer in contestants:
        trainer.step()
        if trainer.name != ALONE:
            verify_gradients(trainer, expected)
    del expected
    steps, repetitions = _effort(contestants, raw, repetitions)
    seconds = compare(raw, [_contestant(each, steps, raw) for each in contestants], repetitions, warmups=1, seed=seed)
    for trainer in contestants[1:]:
        verify_replicas(trainer, raw)
    parameters = contestants[0].parameters
    return Result(
        workload,
        len(parameters),
        sum(each.nbytes for each in parameters),
        steps,
        {name: [each / steps for each in samples] for name, samples in seconds.items()},
    )


def _contestant(trainer: Trainer, steps: int, raw: RawMpi) -> Contestant:
    # A step before the clock starts brings the model back into the caches, as in a training that nobody interrupts.
    return Contestant(trainer.name, trainer.step, partial(trainer.steps, steps), lambda: None)


def _effort(contestants: Sequence[Trainer], raw: RawMpi, repetitions: int | None) -> tuple[int, int]:
    """Return the steps of a turn and the number of repetitions, the same on all ranks."""
    if repetitions is not None and repetitions < 1:
        raise UsageError(f"--repetitions expects a number above 0, got {repetitions}.")
    taken = []
    for trainer in contestants:
        times = []
        for _ in range(3):
            raw.barrier()
            start = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - start)
        taken.append(statistics.median(times))
    *_, floor, total = raw.maximum([taken[0], sum(taken)])
    steps = max(1, round(_TURN_SECONDS / floor))
    affordable = int(_MODEL_SECONDS / (total * (steps + 1)))
    return steps, repetitions or max(_FEWEST, min(_MOST, affordable))


def as_text(conditions: dict[str, Any], results: list[Result]) -> str:
    """The tables with their head and foot."""
    parts = [f"training step, float32, SGD, {heading(conditions)}"]
    for result in results:
        about = f"{result.workload.name}: {result.workload.purpose}"
        amount = f"{result.tensors} tensors, {format_size(result.size)} of gradients"
        parts.append(f"{about}\n{amount}\n{table(_HEADER, _rows(result))}")
    foot = (
        "step: median over repetitions of the slowest rank [interquartile range]; n: repetitions x steps in each.\n"
        "overhead: step minus the step without communication in the same repetition, median [quartiles].\n"
        "hvlike / it: ratio of the median overheads [90 % interval by resampling repetitions]."
    )
    if conditions["without_ddp"]:
        foot += f"\nWithout DDP: {conditions['without_ddp']}."
    return "\n\n".join([*parts, foot])


_HEADER = ["contestant", "n", "step", "overhead", "of step", "hvlike / it"]


def _rows(result: Result) -> list[list[str]]:
    rows = []
    count = f"{len(result.seconds[ALONE])} x {result.steps}"
    for name, samples in result.seconds.items():
        step = Summary.of(samples)
        spread = (step.third_quartile - step.first_quartile) / step.median
        row = [name, count, f"{format_seconds(step.median)} [{spread:.0%}]", "", "", ""]
        if name != ALONE:
            over = Summary.of(result.overheads[name])
            part = relative(samples, result.seconds[ALONE])
            row[3] = f"{_milliseconds(over.median)} [{_milliseconds(over.first_quartile)}, "
            row[3] += f"{_milliseconds(over.third_quartile)}] ms"
            row[4] = f"{part.median:.1%}"
        if name not in (ALONE, OURS):
            ratio = result.ratios[f"{OURS}/{name}"]
            row[5] = "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append(row)
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


BENCHMARK = Benchmark(
    "step", "a training step with hvlike beside torch's DDP and without communication", add_arguments, run
)
