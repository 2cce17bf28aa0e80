"""Which setting to measure next: the table of settings, and Bayesian optimisation over it. Pure functions and logic.

The logarithms of the measured times are modelled by a Gaussian process with a squared-exponential kernel; the next
point is the one with the largest expected improvement over the best of the model.
Source: Jones, Schonlau, Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998; Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 2006, algorithm 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKET_BYTES = tuple(mebibytes << 20 for mebibytes in (1, 2, 4, 8, 16, 32, 64, 128))

FIRST_SHARES = (1, 4, 16)
"""How many times smaller the first bucket may be than the others, so that communication starts earlier."""

CYCLE_MICROSECONDS = (0, 500, 1000, 2500, 5000)
"""How long the coordinator may gather requests before it answers."""


class Choice(NamedTuple):
    """One setting: whole numbers, so that it travels between ranks without rounding."""

    bucket_bytes: int
    first_bucket_bytes: int
    cycle_microseconds: int

    def describe(self) -> str:
        """bucket 8 MiB, first bucket 2 MiB, cycle time 1 ms"""
        return (
            f"bucket {self.bucket_bytes / (1 << 20):g} MiB, first bucket {self.first_bucket_bytes / (1 << 20):g} MiB, "
            f"cycle time {self.cycle_microseconds / 1000:g} ms"
        )


def make_candidates(start: Choice, total_bytes: int, *, overlaps: bool) -> list[Choice]:
    """All choices that differ in effect for gradients of `total_bytes`, `start` first.

    overlaps: whether reduction runs beside backward; without that the size of the first bucket changes nothing for
    the better and is left out of the search.
    """
    limits = sorted({*BUCKET_BYTES, start.bucket_bytes})
    # All limits that hold everything have the same effect.
    enough = next((limit for limit in limits if limit >= total_bytes), limits[-1])
    sizes = [limit for limit in limits if limit <= enough]
    shares = FIRST_SHARES if overlaps else FIRST_SHARES[:1]
    cycles = sorted({*CYCLE_MICROSECONDS, start.cycle_microseconds})
    table = [Choice(size, size // share, cycle) for size in sizes for share in shares for cycle in cycles]
    return [start, *(each for each in table if each != start)]


def coordinates(choices: Sequence[Choice]) -> list[tuple[float, float, float]]:
    """Coordinates of the choices in a space where equal distances mean equal ratios."""
    return [
        (
            math.log2(each.bucket_bytes),
            math.log2(each.bucket_bytes / each.first_bucket_bytes),
            math.log2(1.0 + each.cycle_microseconds / 500),
        )
        for each in choices
    ]


Array = NDArray[np.float64]

LENGTH_SCALES = (1.6, 0.8, 0.4, 0.2)
"""Distances in the unit cube over which times are correlated; the likeliest is used, or else the first."""

_LEAST_NOISE = 1e-6


class Measurement(NamedTuple):
    """One sample: which point of the table was in use, and the time of a step with it, in seconds."""

    point: int
    seconds: float


class Belief(NamedTuple):
    """The process's mean and deviation at every point, in units of the measured deviation."""

    mean: Array
    deviation: Array


def unit_cube(points: Sequence[Sequence[float]]) -> Array:
    """The points with every coordinate stretched to 0..1; a coordinate that never changes becomes 0."""
    table = np.asarray(points, dtype=np.float64)
    low = table.min(axis=0)
    width = table.max(axis=0) - low
    return np.asarray((table - low) / np.where(width > 0, width, 1.0))


def suggest(points: Array, measured: Sequence[Measurement], noise: float) -> int:
    """The index of the point to measure next; the first point of the table before anything was measured.

    points: (count, dimensions) in the unit cube. noise: variance of a measurement relative to that of all of them.
    Ties go to the lower index, so equal inputs give equal answers.
    """
    if not measured:
        return 0
    belief = believe(points, measured, noise)
    best = min(belief.mean[each.point] for each in measured)
    return int(np.argmax(expected_improvement(belief, float(best))))


def best_measured(points: Array, measured: Sequence[Measurement], noise: float) -> int:
    """The index of the measured point that the process believes to be the fastest: one lucky sample does not win."""
    belief = believe(points, measured, noise)
    return min((each.point for each in measured), key=lambda index: (float(belief.mean[index]), index))


def believe(points: Array, measured: Sequence[Measurement], noise: float) -> Belief:
    """The posterior at all points, with the length scale under which the measurements are most likely."""
    values = np.log([each.seconds for each in measured])
    spread = float(values.std())
    values = (values - values.mean()) / (spread or 1.0)
    places = points[[each.point for each in measured]]
    noise = max(noise, _LEAST_NOISE)
    fits = [_fit(places, values, scale, noise) for scale in LENGTH_SCALES]
    fit = max(fits, key=lambda each: each.likelihood)
    across = _kernel(points, places, fit.scale)
    mean = across @ fit.weights
    explained = np.linalg.solve(fit.lower, across.T)
    variance = np.maximum(1.0 - (explained**2).sum(axis=0), 0.0)
    return Belief(mean, np.sqrt(variance))


def expected_improvement(belief: Belief, best: float) -> Array:
    """How much less than `best` a measurement of each point is expected to be."""
    gain = best - belief.mean
    deviation = np.maximum(belief.deviation, 1e-12)
    steps = gain / deviation
    below = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2.0))) for each in steps])
    density = np.exp(-0.5 * steps**2) / math.sqrt(2.0 * math.pi)
    return np.asarray(np.maximum(gain * below + deviation * density, 0.0))


class _Fit(NamedTuple):
    scale: float
    lower: Array
    weights: Array
    likelihood: float


def _fit(places: Array, values: Array, scale: float, noise: float) -> _Fit:
    covariance = _kernel(places, places, scale) + noise * np.eye(len(places))
    lower: Array = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    weights: Array = np.asarray(np.linalg.solve(lower.T, np.linalg.solve(lower, values)), dtype=np.float64)
    likelihood = -0.5 * float(values @ weights) - float(np.log(np.diag(lower)).sum())
    return _Fit(scale, lower, weights, likelihood)


def _kernel(first: Array, second: Array, scale: float) -> Array:
    distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * distance / scale**2))


class TuningSearch:
    """Chooses the next setting from the time of each sample."""

    def __init__(self, table: Sequence[Choice], *, warmup: int, samples: int, noise: float) -> None:
        """Start the search.

        Args:
            table: The choices, the one in use first.
            warmup: How many samples are thrown away at the start.
            samples: How many samples count.
            noise: Variance of a measurement relative to that of all of them.
        """
        self.choice = table[0]
        """The setting in use."""
        self.finished = False
        self._table = table
        self._points = unit_cube(coordinates(table))
        self._index = 0
        self._warmup = warmup
        self._samples = samples
        self._noise = noise
        self._measured: list[Measurement] = []

    @property
    def warming_up(self) -> bool:
        """Whether the next sample will be thrown away."""
        return self._warmup > 0

    def record(self, seconds: float) -> None:
        """Take the time of a step in a sample of `choice`, and set the next `choice`."""
        if self._warmup:
            self._warmup -= 1
            return
        self._measured.append(Measurement(self._index, seconds))
        self.finished = len(self._measured) >= self._samples
        choose = best_measured if self.finished else suggest
        self._index = choose(self._points, self._measured, self._noise)
        self.choice = self._table[self._index]

    def seconds_of(self, choice: Choice) -> float:
        """The shortest time measured with a choice that was in use."""
        return min(each.seconds for each in self._measured if self._table[each.point] == choice)
