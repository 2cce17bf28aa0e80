"""What bench autograd has found: for people, for machines, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.autograd_analysis import Analysis
from hvlike.bench.autograd_work import Step
from hvlike.bench.comparison import Ratio, Summary
from hvlike.bench.conditions import heading
from hvlike.bench.plot import Bars
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds

SAFE, SMART, TENSORPIPE, ALONE = "safe", "smart", "TensorPipe", "one process"
OURS = (SAFE, SMART)
NAMES = (*OURS, TENSORPIPE, ALONE)
"""In the order of the tables."""
_PAIRS = ((SAFE, TENSORPIPE), (SMART, TENSORPIPE), (SMART, SAFE))


@dataclass(frozen=True)
class Result:
    """Seconds of a step for each contestant, one value a turn."""

    step: Step
    samples: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Of times; below 1: the first one is faster."""
        pairs = [pair for pair in _PAIRS if self.samples.keys() >= set(pair)]
        return {f"{name}/{to}": Ratio.of(self.samples, name, to) for name, to in pairs}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        found = {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.samples.items()}
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"work": self.step.title, **asdict(self.step), "unit": "seconds", "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result], analyses: Sequence[Analysis]) -> str:
    """A table of steps and one of analyses, with head and foot."""
    names = [name for name in NAMES if any(name in each.samples for each in results)]
    pairs = [f"{name}/{to}" for name, to in _PAIRS if name in names and to in names]
    rows = [
        [each.step.title, str(len(each.samples[SAFE]))]
        + [_seconds(each.samples.get(name)) for name in names]
        + [_ratio(each.ratios.get(pair)) for pair in pairs]
        for each in results
    ]
    parts = [f"model-parallel step over two workers, {heading(conditions)}", table(["step", "n", *names, *pairs], rows)]
    costs = [
        [f"{each.nodes}", format_seconds(each.backward), _part(each.scan, each), _part(each.order, each)]
        for each in analyses
    ]
    parts.append(table(["nodes", "plain backward", "scan", "order"], costs))
    foot = (
        "step: forward by RPC, backward, get_gradients; median over turns [interquartile range]; a turn's value is\n"
        "the median of its steps. Ratios: of medians [quartiles of the ratios within one round]; below 1 the first is\n"
        "faster. one process: the same arithmetic without RPC. nodes: of a chain of operations on four elements;\n"
        "scan: what every worker does once a backward; order: what one does that waits for others, besides."
    )
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result], analyses: Sequence[Analysis]) -> list[Bars]:
    """Times of the steps, the ratios, and what the analysis costs."""
    nan = float("nan")
    titles = [each.step.title for each in results]
    times = {
        name: [Summary.of(each.samples[name]).median if name in each.samples else nan for each in results]
        for name in NAMES
        if any(name in each.samples for each in results)
    }
    drawn = [Bars("step", "seconds", titles, times, logarithmic=True)]
    pairs = sorted({pair for each in results for pair in each.ratios})
    ratios = {
        pair: [each.ratios[pair].of_medians if pair in each.ratios else nan for each in results] for pair in pairs
    }
    drawn.append(Bars("time, lower is better", "ratio", titles, ratios, line=1.0))
    parts = {
        "scan": [100 * each.scan / each.backward for each in analyses],
        "order": [100 * each.order / each.backward for each in analyses],
    }
    drawn.append(Bars("analysis of a graph", "% of its backward", [f"{each.nodes} nodes" for each in analyses], parts))
    return drawn


def _seconds(samples: list[float] | None) -> str:
    if samples is None:
        return "-"
    summary = Summary.of(samples)
    return f"{format_seconds(summary.median)} [{summary.spread:.0%}]"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.of_medians:.2f} [{ratio.paired.first_quartile:.2f}, {ratio.paired.third_quartile:.2f}]"


def _part(seconds: float, analysis: Analysis) -> str:
    return f"{format_seconds(seconds)} ({seconds / analysis.backward:.0%})"
