"""Reports: sizes and times as people write and read them, tables, and pictures with every panel."""

import argparse
import importlib.util
import math
import struct
from pathlib import Path

import pytest

from hvlike.bench.harness.comparison import Ratio, Summary
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
from hvlike.observe.pictures import png
from hvlike.observe.printing import format_seconds, format_size


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
