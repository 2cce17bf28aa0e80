"""Coroutines: every protocol is a generator that yields while it waits.

A coroutine never blocks. It does what can be done now, yields how it waits (`Wait`), and is advanced again by its
driver. A `Task` is a coroutine in the loop together with its outcome.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")


class Wait(enum.IntEnum):
    """What a routine yields: how the loop may wait before it advances the routine again."""

    NOTIFY = 0
    """Nothing to do until somebody rings this rank's doorbell."""
    POLL = 1
    """An MPI request is pending: test again soon, nobody rings for it."""
    AGAIN = 2
    """Progress was made and more may be possible at once."""


Coroutine: TypeAlias = Generator[Wait, None, T]


def complete(requests: Iterable[Any]) -> Coroutine[None]:
    """Wait until every MPI request in `requests` is complete."""
    for request in requests:
        while not request.Test():
            yield Wait.POLL


class Task(Generic[T]):
    """A routine in the loop, and in time its result or error."""

    __slots__ = ("_after", "done", "error", "result", "routine")

    def __init__(self, routine: Coroutine[T], after: Callable[[Task[T]], None] | None = None) -> None:
        self.routine = routine
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._after = after

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """Record how it ended, then tell who wanted to know. Runs in the loop."""
        self.result, self.error = result, error
        self.done = True
        if self._after is not None:
            self._after(self)
