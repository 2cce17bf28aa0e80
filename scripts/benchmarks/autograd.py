"""bench autograd: a model-parallel step over two ranks beside torch.distributed.autograd over TensorPipe."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from benchmarks.rpc_session import Session, Step, TensorPipePair, run_session, steps_alone
from hvlike import autograd, rpc
from hvlike.autograd.graph import clear
from hvlike.autograd.local_graph import LocalGraph
from hvlike.bench.harness.benchmark import add_common, choice_of, heading
from hvlike.bench.harness.comparison import Ratio, Summary, ratios_of, take_turns, timed, with_samples
from hvlike.bench.harness.report import NO_BAR, Bars, publish, ratio_bars, ratio_cell, table, with_spread
from hvlike.observe.printing import format_seconds

PURPOSE = "a model-parallel step beside torch.distributed.autograd"

_ELEMENTS = 4
_TIMES = 7
SAFE, SMART, TENSORPIPE, ALONE = "safe", "smart", "TensorPipe", "one process"
OURS = (SAFE, SMART)
NAMES = (*OURS, TENSORPIPE, ALONE)  # In the order of the tables
_PAIRS = {"/".join(pair): pair for pair in ((SAFE, TENSORPIPE), (SMART, TENSORPIPE), (SMART, SAFE))}
STEPS = {
    "small": Step(16, 8, 2),
    "medium": Step(256, 64, 2),
    "large": Step(512, 128, 4),
    "unused1": Step(16, 8, 2, unused=1),
    "unused10": Step(16, 8, 2, unused=10),
}
NODES = (100, 1_000, 10_000)
_ROUNDS = 9


@dataclass(frozen=True)
class Analysis:
    """Seconds, medians over repetitions on one rank while the other sleeps."""

    nodes: int
    backward: float  # Of torch's engine over the whole graph
    scan: float  # Finding all nodes, leaves and dependencies: once a backward on every worker
    order: float  # Finding out what can run: only on a worker that waits for gradients of others


def analyse(nodes: int) -> Analysis:
    """Measure a chain of so many small operations. Local, blocks."""
    leaf = torch.randn(_ELEMENTS, requires_grad=True)
    value = leaf
    # A sum at the end and the leaf's own node are two of them.
    for _ in range(nodes - 2):
        value = torch.tanh(value)
    root = value.sum()
    edge = get_gradient_edge(root)

    def scan() -> LocalGraph:
        graph = LocalGraph({})
        graph.reach([edge.node])
        return graph

    def median(work: Callable[[], object]) -> float:
        return statistics.median(timed(work, _TIMES))

    graph = scan()
    return Analysis(
        nodes=len(graph.scan.edges),
        backward=median(lambda: torch.autograd.grad(root, leaf, retain_graph=True)),
        scan=median(scan),
        order=median(lambda: clear(graph.scan.edges, dict(graph.scan.waits), [edge.node])),
    )


@dataclass(frozen=True)
class Result:
    """Seconds of a step for each contestant, one value a turn."""

    step: Step
    samples: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Ratio]:
        return ratios_of(self.samples, _PAIRS)

    def as_json(self) -> dict[str, Any]:
        found = with_samples(self.samples)
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"work": self.step.title, **asdict(self.step), "unit": "seconds", "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result], analyses: Sequence[Analysis]) -> str:
    names = _names(results)
    pairs = [name for name, pair in _PAIRS.items() if set(pair) <= set(names)]
    rows = [
        [each.step.title, str(len(each.samples[SAFE]))]
        + [with_spread(Summary.of(each.samples[name])) if name in each.samples else "-" for name in names]
        + [ratio_cell(each.ratios.get(pair)) for pair in pairs]
        for each in results
    ]
    parts = [f"model-parallel step over two workers, {heading(conditions)}", table(["step", "n", *names, *pairs], rows)]
    costs = []
    for analysis in analyses:
        plain, others = analysis.backward, (analysis.scan, analysis.order)
        cells = (f"{format_seconds(cost)} ({cost / plain:.0%})" for cost in others)
        costs.append([f"{analysis.nodes}", format_seconds(plain), *cells])
    parts.append(table(["nodes", "plain backward", "scan", "order"], costs))
    foot = (
        "step: forward by RPC, backward, get_gradients; median over turns [interquartile range]; a turn's value is\n"
        "the median of its steps. Ratios: of medians [quartiles of the ratios within one round]; below 1 the first is\n"
        "faster. one process: the same arithmetic without RPC. nodes: of a chain of operations on four elements;\n"
        "scan: done by every worker once a backward; order: also done by a worker that waits for others."
    )
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result], analyses: Sequence[Analysis]) -> list[Bars]:
    titles = [each.step.title for each in results]
    times = {
        name: [Summary.of(each.samples[name]) if name in each.samples else NO_BAR for each in results]
        for name in _names(results)
    }
    pairs = [pair for pair in _PAIRS if any(pair in each.ratios for each in results)]
    parts = {name: [100 * getattr(each, name) / each.backward for each in analyses] for name in ("scan", "order")}
    return [
        Bars("step", "seconds", titles, times, logarithmic=True),
        Bars("time, lower is better", "ratio", titles, ratio_bars(results, pairs), line=1.0),
        Bars("analysis of a graph", "% of its backward", [f"{each.nodes} nodes" for each in analyses], parts),
    ]


def _names(results: Sequence[Result]) -> list[str]:
    return [name for name in NAMES if any(name in each.samples for each in results)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = choice_of(STEPS, "step")
    parser.add_argument("--steps", type=steps, default=",".join(STEPS), help="default %(default)s")
    add_common(parser, f"{_ROUNDS} turns of each", TENSORPIPE)


def run(options: argparse.Namespace) -> int:
    return run_session("autograd", options.no_tensorpipe, partial(compare, options))


def compare(options: argparse.Namespace, session: Session) -> None:
    """Measure everything with all contestants and show it. On rank 0."""
    analyses = [analyse(nodes) for nodes in NODES]
    reason = f"Without {TENSORPIPE} where results are unused: torch's backward does not return then."
    if isinstance(session.pair, str):
        reason = f"Without {TENSORPIPE}: {session.pair}."
    results = measure(options, session.pair)
    conditions = {**session.conditions, "left_out": [reason]}
    document = {
        **conditions,
        "results": [each.as_json() for each in results],
        "analysis": [asdict(each) for each in analyses],
    }
    text = as_text(conditions, results, analyses)
    publish(options, document, text, "model-parallel step over two workers", panels(results, analyses))


def measure(options: argparse.Namespace, pair: TensorPipePair | str) -> list[Result]:
    """Measure every step in rounds; the first does not count, a turn's sample is the median of what it has timed."""
    order = random.Random(options.seed)
    results = []
    for step in options.steps:
        turns = {mode: partial(step.measure, rpc, autograd, mode=mode) for mode in OURS}
        if not step.unused:
            turns[ALONE] = partial(steps_alone, step)
            if not isinstance(pair, str):
                turns[TENSORPIPE] = partial(pair.measure, step)
        measured = take_turns(order, turns, (options.repetitions or _ROUNDS) + 1)
        results.append(Result(step, {name: [*map(statistics.median, each[1:])] for name, each in measured.items()}))
    return results
