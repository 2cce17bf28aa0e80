"""bench step: the report names overheads, taken within a repetition, in text, JSON and pictures."""

import pytest

from hvlike.bench.step import StepResult, as_text, overhead_ratio, panels

# The machine became twice as slow in between; the overhead did so, too.
FLOOR = [1.0, 1.0, 2.0, 2.0, 1.0]
OURS = [1.1, 1.1, 2.2, 2.2, 1.1]
THEIRS = [1.5, 1.5, 3.0, 3.0, 1.5]


def result() -> StepResult:
    seconds = {"no communication": FLOOR, "hvlike": OURS, "DDP-gloo": THEIRS, "even faster": FLOOR}
    return StepResult("mlp", "four layers", 8, 64 << 20, 1, seconds)


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
    assert result().overheads["hvlike"] == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.1])
    assert found["relative"]["DDP-gloo"]["median"] == pytest.approx(0.5)
    assert found["ratios"]["hvlike/DDP-gloo"]["value"] == pytest.approx(0.2)
    assert found["ratios"]["hvlike/even faster"] is None
    costs, ratios = panels([result()])
    assert costs.heights["hvlike"] == pytest.approx([10.0])
    assert ratios.heights["hvlike/DDP-gloo"] == pytest.approx([0.2])


def test_a_ratio_to_what_may_be_nothing_is_left_out() -> None:
    """It had intervals up to 11 452, beside which all other bars of the picture vanished."""
    noisy = [0.001, -0.2, 0.3, 0.002, -0.1, 0.2, 0.0005]
    assert overhead_ratio([0.1] * 7, noisy) is None
    clear = overhead_ratio([0.1] * 7, [0.2, 0.3, 0.2, 0.25, 0.2, 0.3, 0.2])
    assert clear is not None
    assert clear.value == pytest.approx(0.5)


def test_what_is_not_in_the_table_is_not_explained() -> None:
    conditions = {
        **dict.fromkeys(("ranks", "nodes", "cores", "torch_threads", "hvlike", "torch", "python", "mpi"), "?"),
        "left_out": [],
    }
    assert "raw exchange" not in as_text(conditions, [result()])
