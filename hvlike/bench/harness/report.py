"""How benchmarks show what they found: tables for people, JSON for programs, pictures of bars and curves."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvlike.bench.harness.comparison import Ratio, Summary
from hvlike.observe.pictures import new_figure
from hvlike.observe.printing import format_seconds

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_PANEL_INCHES = (6.4, 4.4)
_QUARTILES = {"ecolor": "#222222", "capsize": 2.5, "error_kw": {"elinewidth": 0.9}}
_FILLED = 0.8  # Part of the distance between two groups that their bars fill


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    lines = [header, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    cells = ([line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines)
    return "\n".join("  ".join(each).rstrip() for each in cells)


def parse_size(text: str) -> int:
    """Return bytes; units are powers of 1024. Raises: argparse.ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 64KiB or 25MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_sizes(text: str) -> list[int]:
    return [parse_size(each) for each in text.split(",")]


def with_spread(summary: Summary, cell: Callable[[float], str] = format_seconds) -> str:
    """Return a median and the interquartile range as a part of it."""
    return f"{cell(summary.median)} [{summary.spread:.0%}]"


def with_quartiles(median: float, summary: Summary, digits: int = 2) -> str:
    return f"{median:.{digits}f} [{summary.first_quartile:.{digits}f}, {summary.third_quartile:.{digits}f}]"


def ratio_cell(ratio: Ratio | None) -> str:
    """Return a ratio of medians with the quartiles of the ratios within one repetition; "-" for none."""
    return "-" if ratio is None else with_quartiles(ratio.of_medians, ratio.paired)


NO_BAR = Summary(math.nan, math.nan, math.nan)


def ratio_bars(results: Sequence[Any], pairs: Iterable[str]) -> dict[str, list[Summary]]:
    """Return the bars of results that have `ratios`; a gap where one has no such ratio."""
    found = {pair: [each.ratios.get(pair) for each in results] for pair in pairs}
    return {pair: [each.bar if each else NO_BAR for each in ratios] for pair, ratios in found.items()}


_HIGHEST_SPREAD = 2.0  # How many times as high as the highest bar its spread may make a panel


@dataclass(frozen=True)
class Bars:
    """Groups of bars: one value for each group in each series, a Summary with its quartiles; NaN leaves a gap."""

    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | Summary]]
    line: float | None = None  # Height of a line for comparison, for example 1 for ratios
    logarithmic: bool = False
    spread: str = "quartiles"  # What the line on a bar shows

    @property
    def heights(self) -> dict[str, list[float]]:
        """How high the bars are."""
        return {name: [_summary(each).median for each in values] for name, values in self.series.items()}

    def draw(self, axes: Any, colours: Mapping[str, str]) -> None:
        spreads = [self._draw_series(axes, name, colours[name]) for name in self.series]
        axes.set_xticks(range(len(self.groups)), self.groups)
        axes.set_ylabel(f"{self.unit} (thin line: {self.spread})" if any(spreads) else self.unit)
        if self.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        highest = [height for name in self.heights for height in self.heights[name] if height > 0]
        if highest and not self.logarithmic and axes.get_ylim()[1] > _HIGHEST_SPREAD * max(highest):
            # One noisy value with a wide spread would hide all bars.
            axes.set_ylim(top=_HIGHEST_SPREAD * max(highest))
        if self.line is not None:
            axes.axhline(self.line, color="black", linewidth=0.8)

    def _draw_series(self, axes: Any, name: str, colour: str) -> bool:
        """Draw the bars of one contestant; return whether a line on one of them shows a spread."""
        width = _FILLED / len(self.series)
        offset = (list(self.series).index(name) - (len(self.series) - 1) / 2) * width
        found = list(map(_summary, self.series[name]))
        # A median of ratios need not lie between the quartiles of the ratios.
        below = [max(0.0, summary.median - summary.first_quartile) for summary in found]
        above = [max(0.0, summary.third_quartile - summary.median) for summary in found]
        has_spread = any(value > 0 for value in below + above)
        spread: dict[str, Any] = {"yerr": [below, above], **_QUARTILES} if has_spread else {}
        places = [place + offset for place in range(len(self.groups))]
        heights = [summary.median for summary in found]
        bars = axes.bar(places, heights, width, label=name, color=colour, **spread)
        axes.bar_label(bars, fmt="{:.3g}", fontsize="x-small", padding=1)
        return has_spread


def _summary(value: float | Summary) -> Summary:
    return value if isinstance(value, Summary) else Summary.of([value])


@dataclass(frozen=True)
class Curves:
    """Curves over one abscissa, both axes logarithmic; NaN leaves a gap."""

    title: str
    abscissa: str
    unit: str
    positions: Sequence[float]
    series: Mapping[str, Sequence[float]]
    labels: Sequence[str]  # What to write at the positions

    def draw(self, axes: Any, colours: Mapping[str, str]) -> None:
        for name, values in self.series.items():
            axes.plot(self.positions, values, marker="o", markersize=3, label=name, color=colours[name])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(self.positions, self.labels, rotation=30, fontsize="small")
        axes.minorticks_off()
        axes.set_xlabel(self.abscissa)
        axes.set_ylabel(self.unit)


def publish(
    options: argparse.Namespace, document: dict[str, Any], text: str, title: str, panels: Sequence[Bars | Curves]
) -> None:
    """Print the text, or with --json the document as one object; with --plot draw the panels under the title."""
    print(json.dumps(document) if options.json else text)
    if options.plot:
        draw(options.plot, title, panels)


def colours_of(panels: Sequence[Bars | Curves]) -> list[dict[str, str]]:
    """Return the colours of each panel's series: one contestant has one colour in all, also in ratios with hvlike."""
    chosen: dict[str, int] = {}
    found = []
    for panel in panels:
        names = {series: series.removeprefix("hvlike/").removesuffix("/hvlike") for series in panel.series}
        taken = {chosen[name] for name in names.values() if name in chosen}
        free = (number for number in itertools.count() if number not in taken)
        for name in names.values():
            if name not in chosen:
                chosen[name] = next(free)
        found.append({series: f"C{chosen[name]}" for series, name in names.items()})
    return found


def draw(path: Path, title: str, panels: Sequence[Bars | Curves], columns: int = 3) -> None:
    """Write one picture with these panels, row by row. Raises: ImportError without matplotlib, OSError."""
    width, height = _PANEL_INCHES
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(width * columns, height * rows)
    figure.suptitle(title)
    for index, (panel, colours) in enumerate(zip(panels, colours_of(panels), strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        panel.draw(axes, colours)
        axes.set_title(panel.title, fontsize="medium")
        axes.grid(True, axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png")
