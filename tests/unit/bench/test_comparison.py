"""Comparisons: interleaved in an agreed order, warm-ups left out, ratios paired; tables, pictures, reports."""

import argparse
import importlib.util
import math
import random
import struct
from functools import partial
from pathlib import Path

import pytest
from support.bench.some_conditions import CONDITIONS

from hvlike.bench.harness.comparison import (
    Contestant,
    Ratio,
    Summary,
    compare,
    take_turns,
    with_samples,
)
from hvlike.bench.harness.report import (
    NO_BAR,
    Bars,
    Curves,
    colours_of,
    draw,
    parse_size,
    ratio_cell,
    table,
    with_spread,
)
from hvlike.bench.step import StepResult, as_text, overhead_ratio, panels
from hvlike.observe.pictures import png
from hvlike.observe.printing import format_seconds, format_size


class Alone:
    """A job of one rank."""

    def barrier(self) -> None:
        pass

    def maximum(self, values: list[float]) -> list[float]:
        return values


def played(seed: int, repetitions: int = 4) -> tuple[list[str], dict[str, list[float]]]:
    log: list[str] = []
    contestants = [
        Contestant(
            name,
            partial(log.append, f"prepare {name}"),
            partial(log.append, f"run {name}"),
            partial(log.append, f"check {name}"),
        )
        for name in "abc"
    ]
    return log, compare(Alone(), contestants, repetitions, warmups=1, seed=seed)


def test_every_repetition_runs_each_contestant_once() -> None:
    log, samples = played(seed=1)
    assert {name: len(each) for name, each in samples.items()} == {"a": 4, "b": 4, "c": 4}
    runs = [entry[-1] for entry in log if entry.startswith("run")]
    assert all(sorted(runs[start : start + 3]) == ["a", "b", "c"] for start in range(0, 15, 3))
    for index, entry in enumerate(log):
        if entry.startswith("run"):
            assert log[index - 1] == f"prepare {entry[-1]}"


def test_every_result_is_checked_once() -> None:
    log, _ = played(seed=1)
    assert sorted(entry for entry in log if entry.startswith("check")) == ["check a", "check b", "check c"]


def test_who_is_warmed_has_done_the_work_before_on_fresh_input() -> None:
    log: list[str] = []
    warmed = Contestant("a", partial(log.append, "prepare"), partial(log.append, "run")).warmed(2)
    warmed.turn(Alone())
    assert log == ["prepare", "run", "prepare", "run", "prepare", "run"]


def test_the_order_is_random_but_agreed() -> None:
    first, again, other = played(seed=1)[0], played(seed=1)[0], played(seed=2)[0]
    assert first == again
    assert first != other


def test_ratios_are_taken_within_a_repetition() -> None:
    # The machine became ten times slower in between: each alone would say nothing.
    samples = {"ours": [1.0, 10.0, 1.0], "theirs": [2.0, 20.0, 2.0]}
    assert Ratio.of(samples, "theirs", "ours") == Ratio(2.0, Summary(2.0, 2.0, 2.0))


def test_the_ratio_of_medians_stands_beside_them() -> None:
    samples = {"ours": [1.0, 2.0, 4.0], "theirs": [4.0, 2.0, 8.0]}
    assert Ratio.of(samples, "theirs", "ours") == Ratio(2.0, Summary(2.0, 1.5, 3.0))


def test_summary() -> None:
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, 2.0, 4.0)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0)
    assert Summary.of([1.0, 3.0]).median == pytest.approx(2.0)
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)


def test_every_round_gives_each_contestant_a_turn() -> None:
    log: list[str] = []

    def turn(name: str) -> list[float]:
        log.append(name)
        return [float(len(log))]

    measured = take_turns(random.Random(1), {name: partial(turn, name) for name in "abc"}, 4)
    assert all(sorted(log[start : start + 3]) == ["a", "b", "c"] for start in range(0, 12, 3))
    assert {name: [[float(i + 1)] for i, each in enumerate(log) if each == name] for name in "abc"} == measured


def test_json_has_quartiles_and_samples() -> None:
    assert with_samples({"a": (1.0, 2.0, 3.0)}) == {
        "a": {"median": 2.0, "first_quartile": 1.5, "third_quartile": 2.5, "samples": [1.0, 2.0, 3.0]}
    }


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


# The machine became twice as slow in between; the overhead did so, too.
FLOOR = [1.0, 1.0, 2.0, 2.0, 1.0]
OURS = [1.1, 1.1, 2.2, 2.2, 1.1]
THEIRS = [1.5, 1.5, 3.0, 3.0, 1.5]


def result() -> StepResult:
    seconds = {"no communication": FLOOR, "hvlike": OURS, "DDP-gloo": THEIRS, "even faster": FLOOR}
    return StepResult("mlp", "four layers", 8, 64 << 20, 1, seconds)


def test_report_names_what_was_measured() -> None:
    conditions = {
        **CONDITIONS,
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
    for theirs in (noisy, [0.0, 0.0, 1.0] * 2, [-1.0, -2.0, 5.0] * 2):
        assert overhead_ratio([0.1] * len(theirs), theirs) is None
    clear = overhead_ratio([0.1] * 7, [0.2, 0.3, 0.2, 0.25, 0.2, 0.3, 0.2])
    assert clear is not None
    assert clear.value == pytest.approx(0.5)


def test_what_is_not_in_the_table_is_not_explained() -> None:
    assert "raw exchange" not in as_text(CONDITIONS, [result()])


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KiB", 65536), ("64k", 65536), ("1.5 MiB", 1572864), ("2GB", 2 << 30), ("0", 0), ("8B", 8)],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 TiB", "1,5MiB", "many"])
def test_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write 4096, 64KiB or 25MiB"):
        parse_size(text)


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (1024, "1 KiB"), (25 << 20, "25 MiB"), (3 << 29, "1.5 GiB")])
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2 s"), (0.00123, "1.23 ms"), (5e-6, "5 us"), (1e-7, "0.1 us")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_table_is_aligned() -> None:
    assert table(["size", "a"], [["1 KiB", "3"], ["x", "12"]]) == "size    a\n1 KiB   3\nx      12"


def test_cells_have_their_spread() -> None:
    assert with_spread(Summary(2e-3, 1.5e-3, 2.5e-3)) == "2 ms [50%]"
    assert ratio_cell(Ratio(1.5, Summary(1.4, 1.25, 1.75))) == "1.50 [1.25, 1.75]"
    assert ratio_cell(None) == "-"


def size_of(picture: bytes) -> tuple[int, ...]:
    """Width and height, from the header of a PNG."""
    return struct.unpack(">II", picture[16:24])


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = png(str(tmp_path / "found.png"))
    bars = Bars("ratios", "ratio", ["a", "b"], {"x": [1.0, 2.0], "y": [math.nan, 3.0]}, line=1.0)
    curves = Curves("times", "size", "s", [1.0, 1000.0], {"x": [1.0, 2.0], "y": [math.nan, 3.0]}, ["1", "1000"])
    draw(path, "both", [bars, curves])
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    draw(path, "more rows", [bars, curves, bars], columns=2)
    assert size_of(path.read_bytes()) == (size_of(written)[0], 2 * size_of(written)[1])


def test_bars_show_their_spread() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    given = Ratio(1.5, Summary(1.4, 1.25, 1.75)).bar
    bars = Bars("ratios", "ratio", ["a", "b"], {"x": [given, NO_BAR], "y": [2.0, 3.0]})
    bars.draw(figure.add_subplot(), {"x": "C0", "y": "C1"})
    (axes,) = figure.axes
    (spread,) = axes.collections
    assert tuple(point[1] for point in spread.get_segments()[0]) == (1.25, 1.75)
    assert axes.get_ylabel() == "ratio (thin line: quartiles)"


def test_one_wide_spread_does_not_hide_the_bars() -> None:
    noisy = Summary(1.5, 0.1, 12_000.0)
    bars = Bars("ratios", "ratio", ["a"], {"x": [0.2], "y": [noisy]})
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    bars.draw(axes, {"x": "C0", "y": "C1"})
    assert axes.get_ylim()[1] <= 4


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(argparse.ArgumentTypeError, match="does not end in"):
        png(str(tmp_path / "found.pdf"))
    with pytest.raises(argparse.ArgumentTypeError, match="there is no folder"):
        png(str(tmp_path / "nowhere" / "found.png"))


def test_without_matplotlib_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="pip install matplotlib"):
        png("found.png")


def test_a_contestant_has_one_colour_in_all_panels() -> None:
    def panel(*names: str) -> Bars:
        return Bars("", "", ["a"], {name: [1.0] for name in names})

    costs, ratios, others = colours_of([panel("hvlike", "gloo", "MPI"), panel("hvlike/MPI", "hvlike/gloo"), panel("x")])
    assert costs == {"hvlike": "C0", "gloo": "C1", "MPI": "C2"}
    assert ratios == {"hvlike/MPI": "C2", "hvlike/gloo": "C1"}
    assert others == {"x": "C0"}
    [first, second] = colours_of([panel("a", "b"), panel("c", "b", "b/hvlike 2")])
    assert first["b"] == second["b"] == "C1"
    assert len(set(second.values())) == 3
