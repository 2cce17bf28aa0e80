"""bench autograd: a model-parallel step over two ranks beside torch.distributed.autograd over TensorPipe."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import hvlike
from hvlike import autograd, rpc
from hvlike.bench.autograd_analysis import Analysis, analyse
from hvlike.bench.autograd_report import ALONE, OURS, TENSORPIPE, Result, as_text, panels
from hvlike.bench.autograd_work import Step, alone, as_message
from hvlike.bench.benchmark import Benchmark
from hvlike.bench.conditions import runs_on_two_ranks
from hvlike.bench.options import add_common, left_out
from hvlike.bench.plot import draw
from hvlike.bench.rpc_pair import Pair
from hvlike.bench.rpc_session import Setting, let_rank_0_end, session, tensorpipe

STEPS = {
    "small": Step(16, 8, 2),
    "medium": Step(256, 64, 2),
    "large": Step(512, 128, 4),
    "unused1": Step(16, 8, 2, unused=1),
    "unused10": Step(16, 8, 2, unused=10),
}
NODES = (100, 1_000, 10_000)
_ROUNDS = 9

Turn = Callable[[Step], list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=_steps, default=list(STEPS), help=f"default {','.join(STEPS)}")
    parser.add_argument("--no-tensorpipe", action="store_true", help="leave torch.distributed.autograd out")
    add_common(parser, f"{_ROUNDS} turns of each", horovod=False)


def _steps(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    return names


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0. Collective; two ranks. Returns the exit status."""
    if not runs_on_two_ranks("autograd"):
        return 2
    with session("autograd") as setting:
        if hvlike.rank() == 0:
            compare(options, setting)
        let_rank_0_end()
    return 0


def compare(options: argparse.Namespace, setting: Setting) -> None:
    """Measure everything with all contestants and show it. On rank 0, while the main thread of rank 1 sleeps."""
    turns: dict[str, Turn] = {mode: partial(_ours, mode) for mode in OURS}
    turns[ALONE] = alone
    analyses = [analyse(nodes) for nodes in NODES]
    with tensorpipe(setting.cores, left_out(options.no_tensorpipe, "--no-tensorpipe")) as pair:
        if isinstance(pair, Pair):
            turns[TENSORPIPE] = partial(_theirs, pair)
            reasons = [f"Without {TENSORPIPE} where results are unused: torch's backward does not return then."]
        else:
            reasons = [f"Without {TENSORPIPE}: {pair}."]
        results = measure(options, turns)
    show(options, {**setting.conditions, "left_out": reasons}, results, analyses)


def _ours(mode: str, step: Step) -> list[float]:
    return step.measure(rpc, autograd, mode=mode)


def _theirs(pair: Pair, step: Step) -> list[float]:
    return pair.ask(as_message(step))


def measure(options: argparse.Namespace, turns: dict[str, Turn]) -> list[Result]:
    """Every step in rounds: in each round all contestants have a turn, in random order. A first round does not count.

    The sample of a turn is the median of what it has timed.
    """
    order = random.Random(options.seed)
    results = []
    for step in [STEPS[name] for name in options.steps]:
        playing = [name for name in turns if name in OURS or not step.unused]
        samples: dict[str, list[float]] = {name: [] for name in playing}
        for turn in range((options.repetitions or _ROUNDS) + 1):
            for name in order.sample(playing, len(playing)):
                found = statistics.median(turns[name](step))
                if turn:
                    samples[name].append(found)
        results.append(Result(step, samples))
    return results


def show(
    options: argparse.Namespace, conditions: dict[str, Any], results: list[Result], analyses: list[Analysis]
) -> None:
    """Print what was found, and draw it."""
    if options.json:
        found = {"results": [each.as_json() for each in results], "analysis": [asdict(each) for each in analyses]}
        print(json.dumps({**conditions, **found}))
    else:
        print(as_text(conditions, results, analyses))
    if options.plot:
        draw(options.plot, "model-parallel step over two workers", panels(results, analyses))


BENCHMARK = Benchmark(
    "autograd", "a model-parallel step beside torch.distributed.autograd over TensorPipe", add_arguments, run
)
