"""Pictures: a PNG with every panel; wrong files are refused before anything is measured."""

import argparse
import importlib.util
import math
import struct
from pathlib import Path

import pytest

from hvlike.bench.harness.benchmark import positive
from hvlike.bench.harness.report import Bars, Curves, draw
from hvlike.observe.pictures import png


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


def test_numbers_of_repetitions() -> None:
    assert positive("3") == 3
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="no whole number above 0"):
            positive(wrong)
