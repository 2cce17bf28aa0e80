"""bench scaling: what a training step sends at 1, 2, 4, ... ranks, planned and negotiated.

It starts a job for each number of ranks. Messages and bytes are counted where they leave, so they are exact on any
machine; times are of this machine, which may have fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

import hvlike
from benchmarks.jobs import outside_of_jobs, refuse_inside_a_job, run_job
from hvlike.bench.harness.benchmark import add_outputs, positive, positives
from hvlike.bench.harness.comparison import Summary, timed
from hvlike.bench.harness.processes import find_launcher
from hvlike.bench.harness.report import Curves, publish, table
from hvlike.collectives.session.context import current
from hvlike.observe.printing import format_seconds, format_size
from hvlike.transport.messages.traffic import Sent

PURPOSE = "what a step sends at 1 to 32 ranks; without mpirun"

_WAY = ["ranks", "nodes", "agreement"]
_COUNTS = ["control", "most", "control bytes", "data msgs", "data bytes", "MPI calls", "their bytes", "step"]
DEFAULT_RANKS = "1,2,4,8,16,32"
PLANNED, NEGOTIATED = "planned", "negotiated"
_WARMUPS = 3


class RankCounts(NamedTuple):
    sent: Sent
    seconds: list[float]


@dataclass(frozen=True)
class Agreement:
    """What one way to agree, planned or negotiated, costs at one number of ranks. All counts are per step."""

    control: float  # Control messages a rank sends, mean over ranks
    most_control: float  # The same of the rank that sends most: the coordinator
    control_bytes: float
    kinds: dict[str, float]  # Control messages of each kind, mean over ranks
    data_messages: float  # Messages with data to other nodes a rank sends, mean over ranks
    data_bytes: float
    collectives: float  # Calls of MPI's own collectives, mean over ranks
    collective_bytes: float
    seconds: float  # Median over steps of the slowest rank
    quartiles: list[float]


@dataclass(frozen=True)
class Result:
    ranks: int
    nodes: int
    ways: dict[str, Agreement]


def summarise(counts: Sequence[RankCounts], steps: int) -> Agreement:
    sent = [rank.sent for rank in counts]
    kinds: Counter[str] = Counter()
    for each in sent:
        kinds.update(each.control)
    slowest = Summary.of([max(times) for times in zip(*(rank.seconds for rank in counts), strict=True)])

    def mean(values: Iterable[int]) -> float:
        return sum(values) / (len(counts) * steps)

    return Agreement(
        control=mean(each.control_messages for each in sent),
        most_control=max(each.control_messages for each in sent) / steps,
        control_bytes=mean(each.control_bytes for each in sent),
        kinds={kind: mean([number]) for kind, number in sorted(kinds.items())},
        data_messages=mean(each.data_messages for each in sent),
        data_bytes=mean(each.data_bytes for each in sent),
        collectives=mean(each.collectives for each in sent),
        collective_bytes=mean(each.collective_bytes for each in sent),
        seconds=slowest.median,
        quartiles=[slowest.first_quartile, slowest.third_quartile],
    )


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    rows = [
        [
            str(result.ranks),
            str(result.nodes),
            name,
            *(f"{count:.4g}" for count in (way.control, way.most_control, way.control_bytes, way.data_messages)),
            format_size(round(way.data_bytes)),
            f"{way.collectives:.4g}",
            format_size(round(way.collective_bytes)),
            f"{format_seconds(way.seconds)} [{(way.quartiles[1] - way.quartiles[0]) / way.seconds:.0%}]",
        ]
        for result in results
        for name, way in result.ways.items()
    ]
    head = (
        f"what a training step sends, {conditions['tensors']} gradients, {format_size(conditions['bytes'])} in all, "
        f"{conditions['steps']} steps\n{conditions['cores']} cores, "
        + (f"nodes emulated: {conditions['ranks_per_node']} ranks each" if conditions["ranks_per_node"] else "one node")
        + f"\n{conditions['launcher']}"
    )
    foot = (
        "Per step and rank, mean over ranks; most: the rank that sends most control messages.\n"
        "planned: DistributedOptimizer after its first step; negotiated: an allreduce by name for every gradient.\n"
        "data msgs: messages with tensors to other nodes; MPI calls: reductions left to MPI, which cuts them itself.\n"
        "step: median of the slowest rank [interquartile range]; with more ranks than cores it says little."
    )
    if any("waiting" in way.kinds for result in results for way in result.ways.values()):
        foot += "\nSome ranks waited for half a second and reported it (kind waiting): the machine was too busy."
    return f"{head}\n\n{table([*_WAY, *_COUNTS], rows)}\n\n{foot}"


def panels(results: Sequence[Result]) -> list[Curves]:
    ranks = [float(result.ranks) for result in results]
    labels = [str(result.ranks) for result in results]
    messages, seconds = {}, {}
    for name in results[0].ways:
        ways = [result.ways[name] for result in results]
        mean, most = [way.control for way in ways], [way.most_control for way in ways]
        for who, counts in (("mean", mean), ("coordinator", most)):
            # A logarithmic axis has no zero, so the legend says where all values are zero.
            label = f"{name}, {who}" if any(counts) else f"{name}, {who}: none"
            messages[label] = [count or math.nan for count in counts]
        seconds[name] = [1e3 * way.seconds for way in ways]
    return [
        Curves("control messages of a step", "ranks", "messages", ranks, messages, labels),
        Curves("time of a step", "ranks", "ms", ranks, seconds, labels),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positives, default=DEFAULT_RANKS, help="a job for each, default %(default)s")
    nodes = "emulate nodes of N ranks, to count what goes between them"
    parser.add_argument("--ranks-per-node", type=positive, help=nodes)
    parser.add_argument("--steps", type=positive, default=20, help="counted and timed, default 20")
    parser.add_argument("--layers", type=positive, default=4, help="two gradients each, default 4")
    parser.add_argument("--width", type=positive, default=256, help="of a layer, default 256")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds for a job, default 300")
    add_outputs(parser)


@outside_of_jobs
def run(options: argparse.Namespace) -> None:
    refuse_inside_a_job(os.environ, "scaling")
    launcher = find_launcher().path
    arguments = (options.steps, options.layers, options.width)
    settings = {"HVLIKE_RANKS_PER_NODE": str(options.ranks_per_node)} if options.ranks_per_node else {}
    results = []
    for ranks in options.ranks:
        if not options.json:
            print(f"a job of {ranks} ranks ...", file=sys.stderr, flush=True)
        results.append(run_job(measure_ways, arguments, ranks, settings, options.timeout))
    conditions = {
        "benchmark": "scaling",
        "tensors": 2 * options.layers,
        "bytes": 4 * options.layers * (options.width**2 + options.width),
        "steps": options.steps,
        "cores": len(os.sched_getaffinity(0)),
        "ranks_per_node": options.ranks_per_node,
        "launcher": launcher,
    }
    document = {**conditions, "results": [asdict(each) for each in results]}
    publish(options, document, as_text(conditions, results), "what a training step sends", panels(results))


def measure_ways(steps: int, layers: int, width: int) -> Result:
    """Measure both ways, on every rank of a job. Collective."""
    torch.set_num_threads(1)
    hvlike.init()
    ways = {way: measure(make_step(way, layers, width), steps) for way in (PLANNED, NEGOTIATED)}
    result = Result(hvlike.size(), len(current().world.nodes), ways)
    hvlike.shutdown()
    return result


def make_step(way: str, layers: int, width: int) -> Callable[[], None]:
    """A step of hvlike.DistributedOptimizer, or one with a named allreduce of every gradient, all at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    torch.manual_seed(1 + hvlike.rank())
    batch = torch.randn(4, width)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == PLANNED:
        optimizer = hvlike.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if way == NEGOTIATED:
            found = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
            for handle in [hvlike.allreduce_async_(gradient, name=name) for name, gradient in found]:
                hvlike.synchronize(handle)
        optimizer.step()

    return step


def measure(step: Callable[[], None], steps: int) -> Agreement:
    """Take steps, count what they send and time them. Collective; the same on every rank."""
    for _ in range(_WARMUPS):
        step()
    traffic = current().fabric.traffic
    before = traffic.snapshot()
    seconds = timed(step, steps)
    mine = RankCounts(traffic.snapshot() - before, seconds)
    counts: list[RankCounts] = hvlike.allgather_object(mine, name="bench scaling")
    return summarise(counts, steps)
