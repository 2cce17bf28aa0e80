"""Join contexts of one process set: which one this rank is in, and that another rank has left it by an exception.

Contexts are numbered as they are entered, on every rank in the same order. A rank can hear that its peer has failed
in a context before it has entered that context itself: what it still does before is not touched.
"""

from __future__ import annotations

from hvlike.collectives.joining import LeaveEnd
from hvlike.collectives.negotiator import Negotiator
from hvlike.collectives.shadows import Shadows
from hvlike.errors import HorovodInternalError, UsageError


class Rounds:
    """The Join contexts of this rank in one process set. Lives in the loop, but for `enter` and `check`."""

    def __init__(self, shadows: Shadows, negotiator: Negotiator) -> None:
        self.inside = False
        """This rank is in a context."""
        self._entered = 0
        self._number = 0
        """Of the last context that has begun in the loop."""
        self._shadows = shadows
        self._negotiator = negotiator
        self._failure: HorovodInternalError | None = None
        self._early: dict[int, HorovodInternalError] = {}
        negotiator.on_failure = self._hear

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why this context cannot go on: another rank has left it by an exception."""
        return self._failure

    def check(self) -> None:
        """Raise what has ended the context, if something has."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

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

    def _hear(self, number: int, error: HorovodInternalError) -> None:
        if number > self._number:
            self._early[number] = error
        elif number == self._number and self.inside:
            self._fail(error)

    def _fail(self, error: HorovodInternalError) -> None:
        self._failure = error
        self._shadows.fail(error)
