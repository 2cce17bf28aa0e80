"""bench zero: tables, pictures and machines' output of what was measured."""

import pytest
from support.bench.some_conditions import CONDITIONS

from benchmarks.zero import ADAM, ALONE, ZERO, Result, as_text, panels, shapes_of

RESULT = Result(
    elements=1000,
    tensors=3,
    state={ADAM: [8000, 8000], ZERO: [4400, 3600], ALONE: [4400, 3600]},
    gradients={ADAM: [4000, 4000], ZERO: [4000, 4000], ALONE: [2200, 1800]},
    seconds={ADAM: [2e-3, 3e-3, 4e-3], ZERO: [1e-3, 3e-3, 2e-3], ALONE: [1e-3] * 3},
)


def test_no_tensor_of_the_model_is_a_tenth_of_it() -> None:
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes_of(640, 10)]
    assert 50e6 < sum(sizes) < 52e6
    assert max(sizes) < sum(sizes) / 10


def test_the_table_compares_with_an_nth_of_all_state() -> None:
    (row,) = [line.split() for line in as_text(CONDITIONS, RESULT).splitlines() if line.startswith(ZERO)]
    assert row[3:] == ["3", "4.297", "KiB", "1.100", "3.906", "KiB", "2", "ms", "[50%]", "0.500", "[0.500,", "0.750]"]


def test_machines_and_pictures_get_all_contestants() -> None:
    found = RESULT.as_json()
    assert found["ratios"][f"{ALONE}/{ADAM}"]["paired"]["median"] == pytest.approx(1 / 3)
    assert set(found["seconds"]) == {ADAM, ZERO, ALONE}
    assert all(set(panel.series) == {ADAM, ZERO, ALONE} for panel in panels(RESULT))
