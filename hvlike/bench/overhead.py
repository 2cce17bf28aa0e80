"""What communication adds to a step: differences within a repetition, and ratios of such differences."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvlike.bench.comparison import Summary

_RESAMPLES = 2000
_TAIL = 0.05


@dataclass(frozen=True)
class Ratio:
    """A ratio with a 90 % interval from resampled repetitions."""

    value: float
    low: float
    high: float


def overheads(samples: Sequence[float], floor: Sequence[float]) -> list[float]:
    """Return for each repetition the seconds above the floor of the same repetition."""
    return [a - b for a, b in zip(samples, floor, strict=True)]


def relative(samples: Sequence[float], floor: Sequence[float]) -> Summary:
    """Summarise the overheads as fractions of the floor of the same repetition."""
    return Summary.of([a / b - 1 for a, b in zip(samples, floor, strict=True)])


def overhead_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio | None:
    """Return the ratio of the median overheads; the same repetitions are drawn for both sides of the interval.

    None when the median of theirs is not above zero: then there is nothing to compare with.
    """
    if statistics.median(theirs) <= 0:
        return None
    draw = random.Random(seed)
    count = len(ours)
    found = []
    for _ in range(_RESAMPLES):
        chosen = [draw.randrange(count) for _ in range(count)]
        below = statistics.median(theirs[index] for index in chosen)
        if below > 0:
            found.append(statistics.median(ours[index] for index in chosen) / below)
    found.sort()
    value = statistics.median(ours) / statistics.median(theirs)
    low, high = found[int(_TAIL * len(found))], found[int((1 - _TAIL) * len(found))]
    return Ratio(value, low, high)
