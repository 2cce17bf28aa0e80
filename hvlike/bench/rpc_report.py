"""What bench rpc has found: for people, for machines, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.comparison import Ratio, Summary
from hvlike.bench.conditions import heading
from hvlike.bench.plot import Bars
from hvlike.bench.report import table
from hvlike.bench.rpc_work import Idle, Rate, Trip, Work
from hvlike.bench.sizes import format_seconds

OURS, TENSORPIPE, MPI = "hvlike", "TensorPipe", "MPI"
NAMES = (OURS, TENSORPIPE, MPI)
"""In the order of the tables."""


@dataclass(frozen=True)
class Result:
    """What came out for one work: for each contestant and turn one value, or one for each rank.

    Seconds of a round trip or of a call; parts of a core where the pair was idle.
    """

    work: Work
    samples: dict[str, list[list[float]]]

    @property
    def names(self) -> list[str]:
        """Who took part."""
        return [name for name in NAMES if name in self.samples]

    def of(self, name: str, place: int = 0) -> Summary:
        """Median and quartiles over the turns of a contestant. place: the rank, for an idle pair."""
        return Summary.of([each[place] for each in self.samples[name]])

    @property
    def ratios(self) -> dict[str, Ratio]:
        """hvlike's time to that of each other; below 1: hvlike is faster."""
        if isinstance(self.work, Idle):
            return {}
        first = {name: [each[0] for each in turns] for name, turns in self.samples.items()}
        return {name: Ratio.of(first, OURS, name) for name in self.names if name != OURS}

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        unit = "parts of a core" if isinstance(self.work, Idle) else "seconds"
        found = {
            name: [
                {**asdict(self.of(name, place)), "samples": list(values)}
                for place, values in enumerate(zip(*self.samples[name], strict=True))
            ]
            for name in self.names
        }
        ratios = {f"{OURS}/{name}": asdict(each) for name, each in self.ratios.items()}
        return {"work": self.work.title, **asdict(self.work), "unit": unit, "found": found, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """A table for each kind of work, with head and foot."""
    trips, rates, idle = (_of(results, kind) for kind in (Trip, Rate, Idle))
    parts = [f"calls from rank 0 to rank 1, {heading(conditions)}"]
    for title, found, cell in (("round trip", trips, _seconds), ("calls a second", rates, _rate)):
        if found:
            names, others = found[0].names, list(found[0].ratios)
            rows = [
                [each.work.title, str(len(each.samples[OURS])), *(cell(each.of(name)) for name in names)]
                + [_ratio(each.ratios[name]) for name in others]
                for each in found
            ]
            parts.append(table([title, "n", *names, *(f"{OURS} / {name}" for name in others)], rows))
    for each in idle:
        rows = [[name, *(f"{each.of(name, rank).median:.2%}" for rank in (0, 1))] for name in each.names]
        parts.append(table([each.work.title, "rank 0", "rank 1"], rows))
    foot = (
        "Median over turns [interquartile range]; a turn's value is the median of the calls that are timed in it.\n"
        "Ratios: of the times, of medians [quartiles of the ratios within one round]; below 1 hvlike is faster.\n"
        "MPI: blocking sends of the same bytes there and back, 64 for an empty call. idle: parts of a core, median."
    )
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result]) -> list[Bars]:
    """Round trips, calls a second, idle ranks, and the ratios of the times."""
    drawn = []
    for title, unit, kind in (("round trip", "seconds", Trip), ("empty calls", "calls a second", Rate)):
        found = _of(results, kind)
        if found:
            series = {name: [_height(each, name) for each in found] for name in found[0].names}
            drawn.append(Bars(title, unit, [each.work.title for each in found], series, logarithmic=True))
    timed = [each for each in results if each.ratios]
    others = sorted({name for each in timed for name in each.ratios}, key=NAMES.index)
    if others:
        nan = float("nan")
        ratios = {
            f"{OURS} / {name}": [each.ratios[name].of_medians if name in each.ratios else nan for each in timed]
            for name in others
        }
        drawn.append(Bars("time, lower is better", "ratio", [each.work.title for each in timed], ratios, line=1.0))
    for each in _of(results, Idle):
        series = {name: [100 * each.of(name, rank).median for rank in (0, 1)] for name in each.names}
        drawn.append(Bars(each.work.title, "% of a core", ["rank 0", "rank 1"], series))
    return drawn


def _of(results: Sequence[Result], kind: type[Work]) -> list[Result]:
    return [each for each in results if isinstance(each.work, kind)]


def _height(result: Result, name: str) -> float:
    median = result.of(name).median
    return 1.0 / median if isinstance(result.work, Rate) else median


def _seconds(summary: Summary) -> str:
    return f"{format_seconds(summary.median)} [{summary.spread:.0%}]"


def _rate(summary: Summary) -> str:
    return f"{1.0 / summary.median:,.0f} [{summary.spread:.0%}]"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.of_medians:.2f} [{ratio.paired.first_quartile:.2f}, {ratio.paired.third_quartile:.2f}]"
