"""What bench scaling has counted: summed up over ranks, for people, for machines, as a picture."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.plot import Curves
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size
from hvlike.transport.traffic import Sent


@dataclass(frozen=True)
class Rank:
    """What one rank has sent in all its steps, and how long each took."""

    sent: Sent
    seconds: list[float]


@dataclass(frozen=True)
class Way:
    """One way to agree, at one number of ranks. All counts are per step."""

    control: float
    """Control messages a rank sends, mean over ranks."""
    most_control: float
    """The same of the rank that sends most: the coordinator."""
    control_bytes: float
    kinds: dict[str, float]
    """Control messages of each kind, mean over ranks."""
    data_messages: float
    """Messages with data to other nodes a rank sends, mean over ranks."""
    data_bytes: float
    collectives: float
    """Calls of MPI's own collectives, mean over ranks."""
    collective_bytes: float
    seconds: float
    """Median over steps of the slowest rank."""
    quartiles: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """One number of ranks."""

    ranks: int
    nodes: int
    ways: dict[str, Way]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Result:
        """From what the job has printed."""
        ways = {
            name: Way(**{**way, "quartiles": (way["quartiles"][0], way["quartiles"][1])})
            for name, way in answer["ways"].items()
        }
        return cls(answer["ranks"], answer["nodes"], ways)


def summarise(everybody: Sequence[Rank], steps: int) -> Way:
    """Sum up what all ranks have sent in `steps` steps."""
    count = len(everybody) * steps
    sent = [rank.sent for rank in everybody]
    kinds: Counter[str] = Counter()
    for each in sent:
        kinds.update(each.control)
    slowest = [max(times) for times in zip(*(rank.seconds for rank in everybody), strict=True)]
    first, median, third = statistics.quantiles(slowest, n=4, method="inclusive") if len(slowest) > 1 else slowest * 3
    return Way(
        control=sum(each.control_messages for each in sent) / count,
        most_control=max(each.control_messages for each in sent) / steps,
        control_bytes=sum(each.control_bytes for each in sent) / count,
        kinds={kind: number / count for kind, number in sorted(kinds.items())},
        data_messages=sum(each.data_messages for each in sent) / count,
        data_bytes=sum(each.data_bytes for each in sent) / count,
        collectives=sum(each.collectives for each in sent) / count,
        collective_bytes=sum(each.collective_bytes for each in sent) / count,
        seconds=median,
        quartiles=(first, third),
    )


_HEADER = [
    "ranks",
    "nodes",
    "agreement",
    "control",
    "most",
    "control bytes",
    "data msgs",
    "data bytes",
    "MPI calls",
    "their bytes",
    "step",
]


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """The table with its head and foot."""
    rows = [
        [
            str(result.ranks),
            str(result.nodes),
            name,
            f"{way.control:.4g}",
            f"{way.most_control:.4g}",
            f"{way.control_bytes:.4g}",
            f"{way.data_messages:.4g}",
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
        foot += "\nSome ranks waited for half a second and said so (kind waiting): the machine was too busy."
    return f"{head}\n\n{table(_HEADER, rows)}\n\n{foot}"


def panels(results: Sequence[Result]) -> list[Curves]:
    """Control messages over ranks, of a rank on average and of the coordinator, and the time of a step."""
    ranks = [float(result.ranks) for result in results]
    labels = [str(result.ranks) for result in results]
    messages: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for name in results[0].ways:
        ways = [result.ways[name] for result in results]
        messages.update(_named(f"{name}, mean", [way.control for way in ways]))
        messages.update(_named(f"{name}, coordinator", [way.most_control for way in ways]))
        seconds[name] = [1e3 * way.seconds for way in ways]
    return [
        Curves("control messages of a step", "ranks", "messages", ranks, messages, labels),
        Curves("time of a step", "ranks", "ms", ranks, seconds, labels),
    ]


def _named(name: str, values: list[float]) -> dict[str, list[float]]:
    """A curve; zeros have no place on a logarithmic axis, so the legend says where all are."""
    return {name if any(values) else f"{name}: none": [value or math.nan for value in values]}
