"""Which candidate to measure next: Bayesian optimisation over a table of points. Pure functions on numpy arrays.

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

Array = NDArray[np.float64]

LENGTH_SCALES = (1.6, 0.8, 0.4, 0.2)
"""How far apart points of the unit cube may be and still tell of each other; the likeliest wins, or else the first."""

_LEAST_NOISE = 1e-6


class Measurement(NamedTuple):
    """One sample: which point of the table was in use, and the time of a step with it, in seconds."""

    point: int
    seconds: float


class Belief(NamedTuple):
    """What the process says of every point: mean and deviation, in units of the measured deviation."""

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
