"""Arithmetic without numpy's warnings of overflow and invalid values, for less than np.errstate costs.

numpy (2.0 on) keeps what errstate sets in a context variable, so a context in which it is set once serves for ever.
"""

from __future__ import annotations

import contextvars

import numpy as np


class Quiet:
    """Runs functions in which numpy warns of nothing. One thread at a time, not nested."""

    __slots__ = ("run",)

    def __init__(self) -> None:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run
        """Calls a function; what it sets in context variables is seen by later calls here, and by nobody else."""
