"""Figures that ranks send to rank 0, which shows them: one-way messages, so that nobody waits for anybody.

A collective would hang, or lack values, where ranks have different numbers of batches. A message needs no partner.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from hvlike.collectives.context import Context
from hvlike.observe.means import Means, Sums

_TOPIC = 6
_MESSAGES_PER_SECOND = 2000

Column = tuple[str, int]
"""A title, and how many of this title came before on its rank."""


class Gazette:
    """The figures of one job: on rank 0 those of all ranks, elsewhere those of this one."""

    def __init__(self, context: Context) -> None:
        self._rank = context.world.rank
        self._channel = context.fabric.channel
        self._lock = threading.Lock()
        self._means: dict[Column, Means] = {}
        self._titles: dict[str, int] = {}
        self.pause = max(0.5, context.world.size / _MESSAGES_PER_SECOND)
        """Seconds between two messages of a rank in one column: rank 0 has to read them all."""
        if self._rank == 0:
            self._channel.listen(_TOPIC, lambda rank, letter, tensors: self._hear(*letter))

    def open(self, title: str) -> Column:
        """A new column; all ranks that open the same titles in the same order share them."""
        with self._lock:
            number = self._titles.get(title, 0)
            self._titles[title] = number + 1
            return (title, number)

    def report(self, column: Column, sums: Sums) -> None:
        """Add figures of this rank, and tell rank 0. Any thread; does not block."""
        self._hear(column, sums)
        if self._rank:
            self._channel.send_soon(0, _TOPIC, (column, dict(sums)))

    def means(self, column: Column) -> dict[str, float]:
        """The means of what has come."""
        with self._lock:
            return self._means[column].means() if column in self._means else {}

    def _hear(self, column: Column, sums: Any) -> None:
        with self._lock:
            self._means.setdefault(column, Means()).add(sums)


_gazettes: WeakKeyDictionary[Context, Gazette] = WeakKeyDictionary()


def gazette_of(context: Context) -> Gazette:
    """The figures of a job; made at the first question."""
    found = _gazettes.get(context)
    if found is None:
        found = _gazettes[context] = Gazette(context)
    return found
