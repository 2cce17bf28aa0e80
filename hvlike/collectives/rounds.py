"""Join contexts of one process set: which one this rank is in, and that another rank has left it by an exception.

Contexts are numbered as they are entered, on every rank in the same order. A rank can hear that its peer has failed
in a context before it has entered that context itself: what it still does before is not touched.
"""

from __future__ import annotations

from collections.abc import Callable

from hvlike.collectives.joining import Failure, LeaveEnd
from hvlike.collectives.negotiator import Negotiator
from hvlike.collectives.shadows import Shadows
from hvlike.errors import HorovodInternalError, JoinError, UsageError


class Rounds:
    """The Join contexts of this rank in one process set. Lives in the loop, but for `enter` and `check`."""

    def __init__(self, shadows: Shadows, negotiator: Negotiator, perform: Callable[[Callable[[], None]], None]) -> None:
        """perform: has something done in the loop."""
        self.inside = False
        """This rank is in a context."""
        self._entered = 0
        self._number = 0
        """Of the last context that has begun in the loop."""
        self._shadows = shadows
        self._negotiator = negotiator
        self._perform = perform
        self._failure: Failure | None = None
        self._early: dict[int, Failure] = {}
        negotiator.on_failure = self._hear

    def check(self) -> None:
        """Raise JoinError if another rank has left the context by an exception."""
        if self._failure is not None:
            raise JoinError(str(self._failure.error))

    def check_step(self, name: str, step: int, fail: Callable[[HorovodInternalError], None]) -> None:
        """Let a planned step fail, in the loop, that such a rank takes no part in. After it was entered.

        The steps that it has taken part in are completed: all ranks have made the same ones then.
        """
        failure = self._failure
        if failure is not None and failure.misses(name, step):
            error = failure.error
            self._perform(lambda: fail(error))

    def enter(self) -> int:
        """Return the number of the context that begins. Raises: UsageError inside another one of this process set."""
        if self.inside:
            raise UsageError(
                "This rank is in a Join context of the same process set already. List all joinables in one context, or "
                "leave the first one before."
            )
        self.inside = True
        self._entered += 1
        return self._entered

    def begin(self, number: int) -> None:
        """The context of this number has begun; in the loop."""
        self._number = number
        early = self._early.pop(number, None)
        if early is not None:
            self._fail(early)

    def end(self, end: LeaveEnd | None) -> None:
        """All ranks have left the context (None: that can no longer be); in the loop."""
        self.inside = False
        self._failure = None
        if end is None or end.failed:
            self._shadows.reset(() if end is None else end.spare_lanes)

    def _hear(self, number: int, failure: Failure) -> None:
        if number > self._number:
            self._early[number] = failure
        elif number == self._number and self.inside:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._failure = failure
        self._negotiator.stop_steps(failure)
