"""PNG pictures, and that of `timeline summary --plot`: how long each step took, and where the time went.

The only file that imports matplotlib, and only when a picture is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

from hvlike.observe.timelines import Key, Parts, Training

_DOTS_PER_INCH = 110


def png(text: str) -> Path:
    """Check the path of a picture, and that matplotlib is there. Raises: argparse.ArgumentTypeError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib, or 'hvlike[bench]'")
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} for {path.name!r}")
    return path


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches. Raises: ImportError without matplotlib."""
    figure_module = importlib.import_module("matplotlib.figure")
    return figure_module.Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


_PARTS = {
    "compute": ("compute and all else", "#4477aa"),
    "others": ("wait for other ranks", "#ccbb44"),
    "reduction": ("wait for the reduction", "#ee6677"),
}
_HIDDEN = ("reduction beside compute", "#222222")
_OF_RANKS = ("#762a83", "#1b7837", "#c51b7d", "#80cdc1", "#8c510a", "#9970ab", "#a6dba0", "#dfc27d")
"""Of the lines of the first ranks, and of their names beside the bars: none of those above."""
_MISSING = Parts(*[float("nan")] * 5)
_MOST_LINES = 8  # Of more ranks, only the shortest, the median and the longest step are drawn


def draw_steps(path: Path, training: Training) -> None:
    """Write the picture of one training. Raises: ImportError without matplotlib, OSError."""
    steps_figure(training).savefig(path, format="png")


def steps_figure(training: Training) -> Any:
    ranks = len(training.ranks)
    figure = new_figure(13.0, min(12.0, 4.2 + 0.28 * max(0, ranks - 4)))
    figure.suptitle(f"Steps of {training.name}, {ranks} {'rank' if ranks == 1 else 'ranks'}")
    means, times = figure.subplots(1, 2)
    _draw_means(means, training)
    _draw_times(times, training)
    return figure


def _draw_means(axes: Any, training: Training) -> None:
    """A bar for each rank, made of the parts of its mean step."""
    ranks = sorted(training.ranks, key=lambda each: each.rank)
    places = list(range(len(ranks)))
    left = [0.0] * len(ranks)
    for field, (label, colour) in _PARTS.items():
        widths = [getattr(each.mean, field) for each in ranks]
        axes.barh(places, widths, left=left, height=0.7, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    hidden = [each.mean.hidden for each in ranks]
    if any(hidden):
        # It ends where compute ends.
        starts = [each.mean.compute - each.mean.hidden for each in ranks]
        axes.barh(places, hidden, left=starts, height=0.18, color=_HIDDEN[1], label=_HIDDEN[0])
    axes.set_yticks(places, [f"rank {each.rank}" for each in ranks])
    if len(ranks) <= _MOST_LINES:
        for label, colour in zip(axes.get_yticklabels(), _OF_RANKS, strict=False):
            label.set_color(colour)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, mean")
    axes.set_title(f"Where a step's time went ({max(len(each.steps) for each in ranks)} steps)", fontsize="medium")
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _draw_times(axes: Any, training: Training) -> None:
    """The length of each step, and below it its exposed wait."""
    keys = sorted({key for each in training.ranks for key in each.steps})
    positions = list(range(1, len(keys) + 1))
    if len(training.ranks) <= _MOST_LINES:
        for each, colour in zip(sorted(training.ranks, key=lambda each: each.rank), _OF_RANKS, strict=False):
            parts = [each.steps.get(key, _MISSING) for key in keys]
            lengths = [part.step for part in parts]
            waits = [part.others + part.reduction for part in parts]
            axes.plot(positions, lengths, linewidth=1.2, color=colour, label=f"rank {each.rank}")
            axes.plot(positions, waits, linewidth=0.9, linestyle=":", color=colour)
    else:
        lengths_of = [_lengths(training, key) for key in keys]
        low, high = [min(each) for each in lengths_of], [max(each) for each in lengths_of]
        axes.fill_between(positions, low, high, color=_OF_RANKS[0], alpha=0.3)
        middle = [median(each) for each in lengths_of]
        axes.plot(positions, middle, linewidth=1.2, color=_OF_RANKS[0], label="middle rank; band: all ranks")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.set_title("Length of each step (dotted: exposed wait in it)", fontsize="medium")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)


def _lengths(training: Training, key: Key) -> list[float]:
    return [each.steps[key].step for each in training.ranks if key in each.steps]
