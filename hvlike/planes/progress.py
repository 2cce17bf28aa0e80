"""Driving what moves in several rows side by side: each is an order of messages of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hvlike.transport.routine import Routine, Wait


class MovingRow(Protocol):
    """Messages that start and end in order."""

    @property
    def unfinished(self) -> bool:
        """True while messages are left."""

    def step(self) -> bool:
        """Start and end what can be now; True if anything moved."""

    @property
    def requests(self) -> Iterable[Any]:
        """The MPI requests in flight."""


def drive(rows: Sequence[MovingRow]) -> Routine[None]:
    """Advance all rows until none is left; yields while nothing can move."""
    left = [row for row in rows if row.unfinished]
    while left:
        moved = False
        for row in left:
            moved |= row.step()
        left = [row for row in left if row.unfinished]
        if left:
            yield Wait.AGAIN if moved else Wait.POLL


def requests_of(rows: Sequence[MovingRow]) -> list[Any]:
    """The MPI requests in flight; each keeps its memory alive."""
    return [request for row in rows for request in row.requests]
