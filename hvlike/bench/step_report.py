"""What bench step has found: for people, for machines, as a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.comparison import Summary
from hvlike.bench.conditions import heading
from hvlike.bench.overhead import Ratio, overhead_ratio, overheads, relative
from hvlike.bench.plot import Bars
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size
from hvlike.bench.trainers import ALONE, OURS


@dataclass(frozen=True)
class Result:
    """What came out for one model: seconds of a step per repetition for each contestant, the slowest rank each time."""

    model: str
    purpose: str
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
    def relative(self) -> dict[str, Summary]:
        """The same as fractions of the floor, summarised."""
        return {name: relative(self.seconds[name], self.seconds[ALONE]) for name in self.overheads}

    @property
    def ratios(self) -> dict[str, Ratio | None]:
        """hvlike's overhead as a part of each other contestant's."""
        found = self.overheads
        return {f"{OURS}/{name}": overhead_ratio(found[OURS], found[name]) for name in found if name != OURS}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "model": self.model,
            "tensors": self.tensors,
            "bytes": self.size,
            "steps": self.steps,
            "seconds": {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.seconds.items()},
            "overhead": {name: asdict(Summary.of(each)) for name, each in self.overheads.items()},
            "relative": {name: asdict(each) for name, each in self.relative.items()},
            "ratios": {name: asdict(each) if each else None for name, each in self.ratios.items()},
        }


def as_text(conditions: dict[str, Any], results: list[Result]) -> str:
    """One table a model, with head and foot."""
    parts = [f"training step, float32, SGD, {heading(conditions)}"]
    for result in results:
        amount = f"{result.tensors} tensors, {format_size(result.size)} of gradients"
        parts.append(f"{result.model}: {result.purpose}\n{amount}\n{table(_HEADER, _rows(result))}")
    foot = (
        "step: median over repetitions of the slowest rank [interquartile range]; n: repetitions x steps in each.\n"
        "overhead: step minus the step without communication in the same repetition, median [quartiles].\n"
        "hvlike / it: ratio of the median overheads [90 % interval by resampling repetitions]."
    )
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: list[Result]) -> list[Bars]:
    """What a step costs more than without communication, and hvlike's part of what others cost."""
    models = [result.model for result in results]
    costs = {
        name: [100 * result.relative[name].median for result in results] for name in results[0].seconds if name != ALONE
    }
    ratios = {}
    for name in results[0].ratios:
        found = [result.ratios[name] for result in results]
        ratios[name] = [math.nan if each is None else each.value for each in found]
    drawn = [Bars("a step's overhead over no communication", "% of the step", models, costs)]
    if ratios:
        drawn.append(Bars("ratio of overheads, lower is better", "ratio", models, ratios, line=1.0))
    return drawn


_HEADER = ["contestant", "n", "step", "overhead", "of step", "hvlike / it"]


def _rows(result: Result) -> list[list[str]]:
    rows = []
    count = f"{len(result.seconds[ALONE])} x {result.steps}"
    for name, samples in result.seconds.items():
        step = Summary.of(samples)
        row = [name, count, f"{format_seconds(step.median)} [{step.spread:.0%}]", "", "", ""]
        if name != ALONE:
            over = Summary.of(result.overheads[name])
            low, median, high = (
                f"{1e3 * each:.3g}" for each in (over.first_quartile, over.median, over.third_quartile)
            )
            row[3] = f"{median} [{low}, {high}] ms"
            row[4] = f"{result.relative[name].median:.1%}"
        if name not in (ALONE, OURS):
            ratio = result.ratios[f"{OURS}/{name}"]
            row[5] = "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append(row)
    return rows
