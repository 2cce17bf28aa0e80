"""Arithmetic without numpy's warnings of overflow and invalid values, for less than np.errstate costs.

numpy (2.0 on) keeps what errstate sets in a context variable, so a context in which it is set once serves for ever.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


class Quiet:
    """Runs functions in which numpy warns of nothing. One thread at a time, not nested."""

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._context.run(np.seterr, all="ignore")

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`; what it sets in context variables is seen by later calls here, and by nobody else."""
        return self._context.run(function, *args, **kwargs)
