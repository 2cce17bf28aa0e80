"""Pictures as PNG files: the only file that imports matplotlib, and only when a picture is asked for."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

_DOTS_PER_INCH = 110


def png(text: str) -> Path:
    """Return a path for a picture. Raises: argparse.ArgumentTypeError; also without matplotlib, before measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib, or 'hvlike[bench]'")
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} for {path.name!r}")
    return path


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches. Raises: ImportError without matplotlib."""
    figure_module = importlib.import_module("matplotlib.figure")
    return figure_module.Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
