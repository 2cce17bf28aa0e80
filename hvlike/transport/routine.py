"""Routines: how every protocol of the house is written, as a generator that yields while it waits.

A routine never blocks. It does what can be done now, yields how it waits, and is advanced again
by the loop (transport/loop.py), which is the only caller.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


class Wait(enum.IntEnum):
    """What a routine yields: how the loop may wait before it advances the routine again."""

    BELL = 0
    """Nothing to do until somebody rings this rank's doorbell."""
    POLL = 1
    """An MPI request is pending: test again soon, nobody rings for it."""
    AGAIN = 2
    """Progress was made and more may be possible at once."""


Routine: TypeAlias = Generator[Wait, None, T]


def complete(requests: Iterable[Any]) -> Routine[None]:
    """Wait until every MPI request in `requests` is complete."""
    for request in requests:
        while not request.Test():
            yield Wait.POLL
