"""Where in the user's program a call came from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

_HOUSE = str(Path(__file__).parents[1])
_NOT_THE_USER = (_HOUSE, str(Path(torch.__file__).parent))


class Place(NamedTuple):
    """An instruction of a program; str() finds its file and line, which takes longer than to note it."""

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        """/home/me/train.py:12"""
        lines = (line for start, stop, line in self.code.co_lines() if start <= self.instruction < stop)
        return f"{self.code.co_filename}:{next(lines, None) or self.code.co_firstlineno}"


def place_of_caller(known: int = 1) -> Place:
    """The innermost frame that is neither hvlike's nor torch's, as it stands now; known: so many are hvlike's."""
    frame = sys._getframe(known + 1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return Place(frame.f_code, frame.f_lasti)


@functools.cache
def _is_inside(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USER)
