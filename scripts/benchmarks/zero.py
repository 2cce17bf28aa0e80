"""bench zero: Adam with its state spread over the ranks beside Adam with all of it on each, step and memory."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

import hvlike
from hvlike.bench.harness.benchmark import add_common, heading, positive
from hvlike.bench.harness.comparison import Contestant, Ratio, Summary, compare, with_samples
from hvlike.bench.harness.report import Bars, publish, table, with_quartiles, with_spread
from hvlike.bench.peers import Peers, peers
from hvlike.bench.trainers import BenchTrainer, Shape, Workload, bert, shaped
from hvlike.nn import DistributedDataParallel
from hvlike.observe.printing import format_size
from hvlike.optim import ZeroRedundancyOptimizer

PURPOSE = "Adam with its state spread over the ranks beside all of it on each"

ADAM, ZERO, VIEW, ALONE = "DDP + Adam", "DDP + ZeRO", "DDP + ZeRO, views", "ZeRO alone"
TORCH_ADAM, TORCH_ZERO = "torch DDP + Adam", "torch DDP + ZeRO"
_REPETITIONS = 7
_LEARNING_RATE = 1e-4  # Small enough that steps on random data stay finite
_TOLERANCE = 1e-2  # Of sums of 50 M weights that start equal: gradients near zero make Adam's first steps go either way


@dataclass(frozen=True)
class Result:
    """Bytes on each rank, and seconds of a step, of its slowest rank, for each contestant."""

    elements: int
    tensors: int
    state: dict[str, list[int]]  # Of the optimizer, by rank
    gradients: dict[str, list[int]]  # What is left after a step, by rank
    seconds: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "elements": self.elements,
            "tensors": self.tensors,
            "state_bytes": self.state,
            "gradient_bytes": self.gradients,
            "seconds": with_samples(self.seconds),
            "ratios": {f"{name}/{ADAM}": asdict(Ratio.of(self.seconds, name, ADAM)) for name in self.seconds},
        }


def as_text(conditions: dict[str, Any], result: Result) -> str:
    rows = []
    for name, samples in result.seconds.items():
        state, ratio = max(result.state[name]), Ratio.of(result.seconds, name, ADAM).paired
        share = state / (result.state[ADAM][0] / conditions["ranks"])
        row = [name, str(len(samples)), format_size(state), "-" if "Adam" in name else f"{share:.3f}"]
        row += [format_size(max(result.gradients[name])), with_spread(Summary.of(samples))]
        rows.append([*row, with_quartiles(ratio.median, ratio, 3)])
    head = (
        f"training step, float32, Adam, {result.elements / 1e6:.1f} M parameters in {result.tensors} tensors, "
        f"{heading(conditions)}"
    )
    foot = (
        "state: bytes of the optimizer's state on the rank that has most; of 1/N: divided by an N-th of what\n"
        "DDP + Adam keeps on each rank. gradients: what a step leaves on the rank that has most.\n"
        "step: median over repetitions of the slowest rank [interquartile range].\n"
        "/ DDP + Adam: ratios within a repetition, median [quartiles]."
    )
    header = ["contestant", "n", "state", "of 1/N", "gradients", "step", f"/ {ADAM}"]
    return "\n\n".join([head, table(header, rows), foot])


def panels(result: Result) -> list[Bars]:
    state = {name: [max(each) / (1 << 20)] for name, each in result.state.items()}
    steps = {name: [Summary.of(each).each(lambda seconds: 1e3 * seconds)] for name, each in result.seconds.items()}
    return [Bars("optimizer state on a rank", "MiB", ["Adam"], state), Bars("a step", "ms", ["Adam"], steps)]


class ZeroTrainer(BenchTrainer):
    @property
    def state_bytes(self) -> int:
        # torch's ZeroRedundancyOptimizer has the one with the state inside.
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    @property
    def gradient_bytes(self) -> int:
        return sum(each.grad.nbytes for each in self.parameters if each.grad is not None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=positive, default=640, help="of the transformer layers; default 640")
    parser.add_argument("--layers", type=positive, default=10, help="number of those; default 10: 50 M parameters")
    parser.add_argument("--bucket-view", action="store_true", help="ZeRO with parameters_as_bucket_view, too")
    parser.add_argument("--torch", action="store_true", help="torch's own DDP over gloo and ZeRO, too; one node")
    add_common(parser, str(_REPETITIONS))


def run(options: argparse.Namespace) -> int:
    without = None if options.torch else "no --torch"
    with peers(without, "it has no such optimizer") as there:
        result = measure(options, there)
        if hvlike.rank() == 0:
            conditions = there.describe("zero")
            document, text = {**conditions, **result.as_json()}, as_text(conditions, result)
            publish(options, document, text, f"Adam on {hvlike.size()} ranks", panels(result))
    return 0


def shapes_of(width: int, layers: int) -> list[Shape]:
    """The encoder of a transformer with a small vocabulary: no tensor is a large part of it."""
    return [(2 * width, width), *bert(width, layers)[1:]]


def measure(options: argparse.Namespace, there: Peers) -> Result:
    shapes = shapes_of(options.width, options.layers)
    workload = shaped("zero", "a transformer's shapes", shapes)
    chosen = [ADAM, ZERO, *([VIEW] if options.bucket_view else []), ALONE]
    if there.backend is not None:
        chosen += [TORCH_ADAM, TORCH_ZERO]
    trainers = [_make(name, workload, options.seed) for name in chosen]
    state, gradients = {}, {}
    for trainer in trainers:
        trainer.step()
        state[trainer.name] = hvlike.allgather_object(trainer.state_bytes)
        gradients[trainer.name] = hvlike.allgather_object(trainer.gradient_bytes)
        trainer.optimizer.zero_grad()

    def prepare() -> None:
        for trainer in trainers:
            # Only one contestant at a time needs its gradients.
            trainer.optimizer.zero_grad()

    contestants = [Contestant(trainer.name, prepare, trainer.step) for trainer in trainers]
    repetitions = options.repetitions or _REPETITIONS
    seconds = compare(there.raw, contestants, repetitions, warmups=1, seed=options.seed, cold=False)
    right = trainers[0].checksum()
    for trainer in trainers:
        trainer.verify_replicas(there.raw)
        found = trainer.checksum()
        if abs(found - right) > _TOLERANCE * max(1.0, abs(right)):
            raise hvlike.HvlikeError(f"{trainer.name} left other weights than {ADAM}: sums {found} and {right}.")
    elements = sum(each.numel() for each in trainers[0].parameters)
    return Result(elements, len(shapes), state, gradients, seconds)


def _make(name: str, workload: Workload, seed: int) -> ZeroTrainer:
    trainer = ZeroTrainer(name, workload, seed, hvlike.rank())
    model, parameters, rate = trainer.model, list(trainer.model.parameters()), _LEARNING_RATE
    if name in (TORCH_ADAM, TORCH_ZERO):
        parallel: Any = torch.nn.parallel.DistributedDataParallel
        trainer.network = parallel(model, gradient_as_bucket_view=True)
    elif name != ALONE:
        trainer.network = DistributedDataParallel(model)
    if name in (ADAM, TORCH_ADAM):
        trainer.optimizer = Adam(parameters, lr=rate)
    elif name == TORCH_ZERO:
        from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs

        made: Any = Theirs
        trainer.optimizer = made(parameters, Adam, lr=rate)
    else:
        alone, view = name == ALONE, name == VIEW
        trainer.optimizer = ZeroRedundancyOptimizer(
            parameters, Adam, reduce_gradients=alone, parameters_as_bucket_view=view, lr=rate
        )
    return trainer
