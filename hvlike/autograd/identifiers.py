"""Names that are unique in a session without asking anybody: the rank that gives them and a number of its own."""

from __future__ import annotations

from itertools import count

_BITS = 48
"""Of the number; the rank stands above them."""


class Identifiers:
    """Gives the names of one worker, in ascending order. Safe from any thread."""

    def __init__(self, rank: int, first: int = 0) -> None:
        self._numbers = count((rank << _BITS) + first)

    def new(self) -> int:
        """The next name."""
        return next(self._numbers)


def end_of(rank: int) -> int:
    """Above all names that a worker gives."""
    return (rank + 1) << _BITS


def giver_of(identifier: int) -> int:
    """The rank that gave this name."""
    return identifier >> _BITS


def in_words(identifier: int) -> str:
    """The rank that gave this name, and its number there."""
    giver = giver_of(identifier)
    return f"{giver}.{identifier - (giver << _BITS)}"
