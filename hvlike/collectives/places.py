"""Where in the user's program a call came from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

_HOUSE = str(Path(__file__).parents[1])
_NOT_THE_USER = (_HOUSE, str(Path(torch.__file__).parent))


def place_of_caller() -> str:
    """File and line of the innermost frame that is neither hvlike's nor torch's: "/home/me/train.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _is_inside(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USER)
