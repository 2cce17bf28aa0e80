"""The Join contexts of a process set: which one this rank is in, and that another rank has left it by an exception."""

from __future__ import annotations

from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.member_tree import FAILED
from hvlike.collectives.requests.join_protocol import JoinFailure, LeaveEnd
from hvlike.collectives.session.joined_proxy import JoinedProxies
from hvlike.errors import JoinError, UsageError
from hvlike.transport.fabric import PlanEpoch
from hvlike.transport.loop.coroutine import in_loop


class JoinContexts:
    def __init__(self, proxies: JoinedProxies, controller: Controller, epoch: PlanEpoch) -> None:
        """epoch: the guard of plans."""
        self._epoch = epoch
        self.inside = False
        self._entered = 0
        self._number = 0  # Of the last context that has begun in the loop
        self._proxies = proxies
        self._positions = controller.positions
        self._early: dict[int, JoinFailure] = {}
        controller.listen(FAILED, lambda rank, left: self._hear(*left))

    @property
    def failed(self) -> bool:
        """Another rank has left the context with an exception, and this one has not left it yet."""
        return self._positions.failure is not None

    def check(self) -> None:
        failure = self._positions.failure
        if failure is not None:
            raise JoinError(str(failure.error))

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

    @in_loop
    def begin(self, number: int) -> None:
        """The context of this number has begun."""
        self._number = number
        early = self._early.pop(number, None)
        if early is not None:
            self._fail(early)

    @in_loop
    def end(self, end: LeaveEnd | None) -> None:
        """All ranks have left the context (None: that can no longer be)."""
        self.inside = False
        self._positions.fail(None)
        if end is None or end.failed:
            self._proxies.reset(() if end is None else end.spare_queues)

    @in_loop
    def _hear(self, number: int, failure: JoinFailure) -> None:
        """A member has left the context of this number by an exception."""
        if number > self._number:
            self._early[number] = failure
        elif number == self._number and self.inside:
            self._fail(failure)

    def _fail(self, failure: JoinFailure) -> None:
        self._epoch.advance()
        self._positions.fail(failure)
