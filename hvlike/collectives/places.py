"""Where in the user's program a call came from."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_HOUSE = str(Path(__file__).parents[1])
_NOT_THE_USER = (_HOUSE, str(Path(torch.__file__).parent))


def place_of_caller() -> str:
    """File and line of the innermost frame that is neither hvlike's nor torch's: "/home/me/train.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
