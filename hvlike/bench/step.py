"""bench step: a training step with hvlike beside torch's DDP, Horovod, and the same step without communication."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import hvlike
from hvlike.bench.harness.benchmark import add_bare_and_device, add_common, choice_of, heading
from hvlike.bench.harness.comparison import Contestant, Summary, compare, with_samples
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.harness.report import NO_BAR, Bars, publish, table, with_spread
from hvlike.bench.peers import Peers, peers
from hvlike.bench.reducers import EXCHANGE, EXCHANGE_MEANS, BareLoop
from hvlike.bench.trainers import (
    ALONE,
    DEFAULT,
    OURS,
    WORKLOADS,
    BenchTrainer,
    Workload,
    contestants,
    expected_gradients,
)
from hvlike.observe.printing import format_size

PURPOSE = "a training step beside torch's DDP, Horovod and no communication"

_RESAMPLES = 2000
_TAIL = 0.05
_HEADER = ["contestant", "n", "step", "overhead", "of step", "hvlike / it"]
# A turn is long enough to be told from noise; a model takes about so long in all.
_TURN_SECONDS = 0.04
_MODEL_SECONDS = 12.0
_FEWEST, _MOST = 7, 60
_FIRST_STEPS = 10  # In these hvlike learns the order of the gradients and makes its plan


@dataclass(frozen=True)
class OverheadRatio:
    """A ratio with a 90 % interval from resampled repetitions."""

    value: float
    low: float
    high: float


def overhead_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> OverheadRatio | None:
    """Return the ratio of the medians; None where theirs is not clearly above zero: nothing can be said then.

    The same repetitions are drawn for both sides of it.
    """
    if statistics.median(theirs) <= 0:
        return None
    draw = random.Random(seed)
    count = len(ours)
    found = []
    unclear = 0
    for _ in range(_RESAMPLES):
        chosen = [draw.randrange(count) for _ in range(count)]
        below = statistics.median(theirs[index] for index in chosen)
        if below > 0:
            found.append(statistics.median(ours[index] for index in chosen) / below)
        else:
            unclear += 1
    if unclear > _TAIL * _RESAMPLES:
        return None
    found.sort()
    value = statistics.median(ours) / statistics.median(theirs)
    low, high = found[int(_TAIL * len(found))], found[int((1 - _TAIL) * len(found))]
    return OverheadRatio(value, low, high)


@dataclass(frozen=True)
class StepResult:
    model: str
    purpose: str
    tensors: int
    size: int  # Bytes of all gradients
    steps: int  # Steps in a row whose mean is one repetition
    seconds: dict[str, list[float]]

    @property
    def overheads(self) -> dict[str, list[float]]:
        """Seconds above the floor of the same repetition, of all but the floor."""
        floor = self.seconds[ALONE]
        others = {name: each for name, each in self.seconds.items() if name != ALONE}
        return {name: [a - b for a, b in zip(each, floor, strict=True)] for name, each in others.items()}

    @property
    def relative(self) -> dict[str, Summary]:
        """The same as fractions of the floor, summarised."""
        parts = {name: zip(each, self.seconds[ALONE], strict=True) for name, each in self.overheads.items()}
        return {name: Summary.of([over / floor for over, floor in each]) for name, each in parts.items()}

    @property
    def ratios(self) -> dict[str, OverheadRatio | None]:
        found = self.overheads
        return {f"{OURS}/{name}": overhead_ratio(found[OURS], found[name]) for name in found if name != OURS}

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tensors": self.tensors,
            "bytes": self.size,
            "steps": self.steps,
            "seconds": with_samples(self.seconds),
            "overhead": {name: asdict(Summary.of(each)) for name, each in self.overheads.items()},
            "relative": {name: asdict(each) for name, each in self.relative.items()},
            "ratios": {name: asdict(each) if each else None for name, each in self.ratios.items()},
        }


def as_text(conditions: dict[str, Any], results: list[StepResult]) -> str:
    parts = [f"training step, float32, SGD, {heading(conditions)}"]
    for result in results:
        amount = f"{result.tensors} tensors, {format_size(result.size)} of gradients"
        parts.append(f"{result.model}: {result.purpose}\n{amount}\n{table(_HEADER, _rows(result))}")
    foot = (
        "step: median over repetitions of the slowest rank [interquartile range]; n: repetitions x steps in each.\n"
        "overhead: step minus the step without communication in the same repetition, median [quartiles].\n"
        "hvlike / it: ratio of the median overheads [90 % interval by resampling repetitions]."
    )
    if any(EXCHANGE in result.seconds for result in results):
        foot += f"\n{EXCHANGE_MEANS}"
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: list[StepResult]) -> list[Bars]:
    """What a step costs more than without communication, and hvlike's part of what others cost."""
    models = [result.model for result in results]
    costs = {}
    # Some take part in the steps of some models only.
    for name in dict.fromkeys(each for result in results for each in result.overheads):
        parts = [result.relative.get(name) for result in results]
        costs[name] = [NO_BAR if each is None else each.each(lambda part: 100 * part) for each in parts]
    ratios = {}
    for name in dict.fromkeys(each for result in results for each in result.ratios):
        found = [result.ratios.get(name) for result in results]
        ratios[name] = [NO_BAR if each is None else Summary(each.value, each.low, each.high) for each in found]
    drawn = [Bars("a step's overhead over no communication", "% of the step", models, costs)]
    if ratios:
        title = "ratio of overheads, lower is better"
        drawn.append(Bars(title, "ratio", models, ratios, line=1.0, spread="90 % interval"))
    return drawn


def _rows(result: StepResult) -> list[list[str]]:
    rows = []
    for name, samples in result.seconds.items():
        row = [name, f"{len(samples)} x {result.steps}", with_spread(Summary.of(samples)), "", "", ""]
        if name != ALONE:
            over = Summary.of(result.overheads[name])
            figures = (over.first_quartile, over.median, over.third_quartile)
            low, median, high = (f"{1e3 * each:.3g}" for each in figures)
            row[3:5] = f"{median} [{low}, {high}] ms", f"{result.relative[name].median:.1%}"
        if name not in (ALONE, OURS):
            ratio = result.ratios[f"{OURS}/{name}"]
            row[5] = "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default, known = ",".join(DEFAULT), ", ".join(WORKLOADS)
    models = choice_of(WORKLOADS, "model")
    parser.add_argument("--models", type=models, default=models(default), help=f"of {known}; default {default}")
    parser.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view, too")
    add_bare_and_device(parser, "the model")
    add_common(parser, f"what takes about {_MODEL_SECONDS:.0f} s a model, {_FEWEST} to {_MOST}", "DDP", "Horovod")


def run(options: argparse.Namespace) -> int:
    hvlike.init()
    if hvlike.size() == 1 and options.device == "cpu":
        text = "bench step measures what communication adds to a step, and one rank does not communicate."
        print(f"{text} Start two or more: mpirun -n 2 python -m hvlike bench step", file=sys.stderr)
        return 2
    with peers(options.no_ddp, options.no_horovod, options.device) as there:
        bare = BareLoop() if options.bare else None
        results = [measure(replace(each, device=there.device), there, options, bare) for each in options.models]
        if hvlike.rank() == 0:
            conditions = there.describe("step")
            document = {**conditions, "results": [each.as_json() for each in results]}
            title = f"training step on {hvlike.size()} ranks"
            publish(options, document, as_text(conditions, results), title, panels(results))
    return 0


def measure(workload: Workload, there: Peers, options: argparse.Namespace, bare: BareLoop | None) -> StepResult:
    trainers = contestants(workload, options.seed, there.raw, there.backend, options.bucket_view, bare)
    return train(workload, trainers, there, options)


def train(
    workload: Workload, trainers: Sequence[BenchTrainer], there: Peers, options: argparse.Namespace
) -> StepResult:
    """Measure these, the first of them without communication. Collective."""
    rank, raw, seed = hvlike.rank(), there.raw, options.seed
    expected = expected_gradients(workload.model(seed), workload.data(seed + 1 + rank), raw)
    for trainer in trainers:
        trainer.step()
        if trainer.name != ALONE:
            trainer.verify_gradients(expected, rank)
        trainer.steps(_FIRST_STEPS - 1)
    del expected
    steps, affordable = _effort(trainers, raw)
    # A step before the clock starts brings the model back into the caches, as in a training without interruptions.
    entered = [Contestant(each.name, partial(each.steps, 1), partial(each.steps, steps)) for each in trainers]
    if there.horovod is not None:
        there.horovod.ask({"work": "step", "cold": False, "model": workload.name, "seed": seed})
        entered.append(there.horovod.contestant(steps))
    seconds = compare(raw, entered, options.repetitions or affordable, warmups=1, seed=seed)
    for trainer in trainers[1:]:
        trainer.verify_replicas(raw)
    parameters = trainers[0].parameters
    return StepResult(
        workload.name,
        workload.purpose,
        len(parameters),
        sum(each.nbytes for each in parameters),
        steps,
        {name: [each / steps for each in samples] for name, samples in seconds.items()},
    )


def _effort(trainers: Sequence[BenchTrainer], raw: RawMpi) -> tuple[int, int]:
    """Return the steps of a turn and how many repetitions there is time for, the same on all ranks."""
    once = (Contestant(each.name, lambda: None, partial(each.steps, 1)) for each in trainers)
    taken = [statistics.median(each.turn(raw) for _ in range(3)) for each in once]
    floor, total = raw.maximum([taken[0], sum(taken)])
    steps = max(1, round(_TURN_SECONDS / floor))
    return steps, max(_FEWEST, min(_MOST, int(_MODEL_SECONDS / (total * (steps + 1)))))
