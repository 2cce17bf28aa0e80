"""A routine that the loop advances, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hvlike.transport.routine import Routine

T = TypeVar("T")


class Task(Generic[T]):
    """A routine in the loop, and in time its result or error."""

    __slots__ = ("_after", "done", "error", "result", "routine")

    def __init__(self, routine: Routine[T], after: Callable[[Task[T]], None] | None = None) -> None:
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
