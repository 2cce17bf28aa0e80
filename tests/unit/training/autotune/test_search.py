"""The search finds the fastest point of a table in few samples, also when times are noisy."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlike.training.autotune import (
    Measurement,
    believe,
    best_measured,
    expected_improvement,
    suggest,
    unit_cube,
)

GRID = [(float(x), float(y)) for x in range(8) for y in range(4)]
POINTS = unit_cube(GRID)


def seconds(index: int, low: tuple[float, float]) -> float:
    """A smooth valley with its floor at `low`."""
    return 0.01 * (1.0 + 0.05 * math.dist(GRID[index], low) ** 2)


def run(low: tuple[float, float], samples: int, noise: float, jitter: float = 0.0) -> int:
    """Measure and suggest in turn; the index of the winner."""
    dice = random.Random(1)
    measured: list[Measurement] = []
    for _ in range(samples):
        index = suggest(POINTS, measured, noise)
        measured.append(Measurement(index, seconds(index, low) * (1.0 + jitter * dice.uniform(-1, 1))))
    return best_measured(POINTS, measured, noise)


@pytest.mark.parametrize("low", [(0.0, 0.0), (7.0, 3.0), (3.0, 1.0), (5.0, 2.0), (2.0, 3.0)])
def test_the_floor_of_a_valley_is_found(low: tuple[float, float]) -> None:
    best = run(low, samples=16, noise=0.001)
    assert math.dist(GRID[best], low) <= 1.0


@pytest.mark.parametrize("low", [(0.0, 0.0), (7.0, 3.0), (4.0, 2.0)])
def test_noise_does_not_mislead_far(low: tuple[float, float]) -> None:
    best = run(low, samples=20, noise=0.1, jitter=0.05)
    assert seconds(best, low) <= 1.15 * seconds(GRID.index(low), low)


def test_what_is_in_use_is_measured_first_and_the_farthest_next() -> None:
    assert suggest(POINTS, [], noise=0.8) == 0
    second = suggest(POINTS, [Measurement(0, 0.01)], noise=0.01)
    assert GRID[second] == (7.0, 3.0)


def test_one_lucky_sample_does_not_win() -> None:
    # Point 9 is slow every time but one; point 0 is always fast.
    measured = [Measurement(0, 0.010)] * 4 + [Measurement(9, 0.020)] * 3 + [Measurement(9, 0.0095)]
    assert best_measured(POINTS, measured, noise=0.8) == 0


def test_a_measured_point_is_known_and_a_far_one_is_not() -> None:
    belief = believe(POINTS, [Measurement(0, 0.01), Measurement(1, 0.02)], noise=1e-4)
    assert belief.deviation[0] < 0.05
    assert belief.deviation[-1] > 0.5
    assert belief.mean[0] < belief.mean[1]


def test_improvement_is_never_negative_and_needs_doubt_or_gain() -> None:
    belief = believe(POINTS, [Measurement(0, 0.01), Measurement(31, 0.02)], noise=1e-4)
    gains = expected_improvement(belief, float(belief.mean[0]))
    assert (gains >= 0).all()
    assert gains[0] < gains.max() / 10


@settings(max_examples=30)
@given(
    samples=st.lists(st.tuples(st.integers(0, len(GRID) - 1), st.floats(1e-6, 1e3)), min_size=1, max_size=25),
    noise=st.floats(0, 4),
)
def test_any_measurements_give_a_point_and_the_same_one_again(samples: list[tuple[int, float]], noise: float) -> None:
    measured = [Measurement(*each) for each in samples]
    first = suggest(POINTS, measured, noise)
    assert 0 <= first < len(GRID)
    assert first == suggest(POINTS, list(measured), noise)
    assert best_measured(POINTS, measured, noise) in {each.point for each in measured}


def test_a_coordinate_that_never_changes_does_not_count() -> None:
    table = unit_cube([(3.0, 1.0), (3.0, 5.0)])
    assert np.array_equal(table, [[0.0, 0.0], [0.0, 1.0]])
