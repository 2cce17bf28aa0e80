"""Overheads of bench step: differences within a repetition, ratios of medians, intervals by resampling."""

import pytest

from hvlike.bench.harness.comparison import overhead_ratio, overheads, relative
from hvlike.bench.step import Result, as_text, panels

# The machine became twice as slow in between; the overhead did so, too.
FLOOR = [1.0, 1.0, 2.0, 2.0, 1.0]
OURS = [1.1, 1.1, 2.2, 2.2, 1.1]
THEIRS = [1.5, 1.5, 3.0, 3.0, 1.5]


def test_overheads_are_taken_within_a_repetition() -> None:
    assert overheads(OURS, FLOOR) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.1])
    assert relative(THEIRS, FLOOR).median == pytest.approx(0.5)


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    ratio = overhead_ratio([1.0, 2.0, 3.0, 9.0, 2.0], [10.0, 20.0, 10.0, 10.0, 40.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(0.2)
    assert ratio.low < ratio.value < ratio.high


def test_intervals_pair_repetitions() -> None:
    # In every repetition ours is a fifth of theirs, so every resample says a fifth, however much both scatter.
    theirs = [1.0, 5.0, 2.0, 10.0, 7.0]
    ratio = overhead_ratio([each / 5 for each in theirs], theirs)
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize("theirs", [[0.0, 0.0, 1.0], [-1.0, -2.0, 5.0]])
def test_no_ratio_to_an_overhead_that_is_none(theirs: list[float]) -> None:
    assert overhead_ratio([1.0, 1.0, 1.0], theirs) is None


def result() -> Result:
    seconds = {"no communication": FLOOR, "hvlike": OURS, "DDP-gloo": THEIRS, "even faster": FLOOR}
    return Result("mlp", "four layers", 8, 64 << 20, 1, seconds)


def test_report_names_what_was_measured() -> None:
    conditions = {
        **dict.fromkeys(("ranks", "nodes", "cores", "torch_threads", "hvlike", "torch", "python", "mpi"), "?"),
        "left_out": ["Without Horovod: not installed."],
    }
    text = as_text(conditions, [result()])
    ours, theirs, none = (
        next(line for line in text.splitlines() if line.startswith(name))
        for name in ("hvlike  ", "DDP-gloo", "even faster")
    )
    assert "100 [100, 200] ms" in ours
    assert "10.0%" in ours
    assert "0.200 [0.200, 0.200]" in theirs
    assert none.endswith("-")
    assert text.endswith("Without Horovod: not installed.")


def test_json_and_picture_hold_the_same() -> None:
    found = result().as_json()
    assert found["overhead"]["DDP-gloo"]["median"] == pytest.approx(0.5)
    assert found["ratios"]["hvlike/DDP-gloo"]["value"] == pytest.approx(0.2)
    assert found["ratios"]["hvlike/even faster"] is None
    costs, ratios = panels([result()])
    assert costs.series["hvlike"] == pytest.approx([10.0])
    assert ratios.series["hvlike/DDP-gloo"] == pytest.approx([0.2])
