"""How far this rank is in each order of operations that goes without the coordinator, and where it waits in one.

The steps of a plan or of a planned queue, and the inline reductions of a set, are not negotiated. Each such order has a
name, and operation n of it on one rank is operation n on all. These numbers tell who is behind: in stall reports, in
the search for deadlocks, and where a rank has left a Join context in the middle. The groups of torch.distributed, which
may be of some ranks only, know theirs themselves (`CallOrders`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hvlike.collectives.health.stall_inspector import Submission
from hvlike.collectives.health.wait_for_graph import GROUP, STEP
from hvlike.collectives.requests.join_protocol import JoinFailure
from hvlike.collectives.requests.request import CallSite, RequestKey
from hvlike.errors import HorovodInternalError
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import in_loop

Stop = Callable[[HorovodInternalError], None]


class CallOrders(Protocol):
    """The groups of torch.distributed that this rank belongs to, each an order of calls."""

    def made(self) -> Mapping[str, int]:
        """By the name of a group: how many calls this rank has made in it."""

    def may_go_on(self) -> bool:
        """Whether this rank may make more calls while its program waits: in what is chained to a future."""

    def stop(self, name: str, error: HorovodInternalError) -> None:
        """End a group, if it is one of this rank's."""


@dataclass(eq=False)
class _OrderedWait:
    name: str
    number: int
    place: CallSite
    detail: str
    stop: Stop
    since: float


class Positions:
    def __init__(self, perform: Callable[[Callable[[], None]], None]) -> None:
        """perform: has something done in the loop."""
        self.entered: dict[str, int] = {}
        """By the name of an order: the number of the last operation that this rank has begun."""
        self._perform = perform
        self._waits: list[_OrderedWait] = []
        self.failure: JoinFailure | None = None
        """Why a member takes no part in operations that it has not begun; None while all do."""
        self.calls: CallOrders | None = None
        """Of the set of all ranks, once there is a group."""

    def wait_begins(self, name: str, number: int, place: CallSite, detail: str, stop: Stop) -> Callable[[], None]:
        """This rank waits for operation `number` of an order; call what is returned when it does no longer.

        stop: ends that wait, in the loop.
        """
        waiting = _OrderedWait(name, number, place, detail, stop, system.monotonic())
        self._waits.append(waiting)
        failure = self.failure
        if failure is not None and failure.misses(name, number):
            self._perform(lambda: stop(failure.error))
        return lambda: self._waits.remove(waiting)

    @in_loop
    def fail(self, failure: JoinFailure | None) -> None:
        """Set `failure`: what this rank waits for in vain ends, now and later."""
        self.failure = failure
        for each in list(self._waits):
            if failure is not None and failure.misses(each.name, each.number):
                each.stop(failure.error)

    @in_loop
    def stop(self, key: RequestKey, error: HorovodInternalError) -> None:
        """No rank can go on, and this one waits in an operation of the order `key`, perhaps."""
        for each in list(self._waits):
            if key == (STEP, each.name):
                each.stop(error)
        kind, name = key
        if kind == GROUP and self.calls is not None:
            self.calls.stop(name, error)

    @in_loop
    def close(self, error: HorovodInternalError) -> None:
        for each in list(self._waits):
            each.stop(error)

    def submissions(self, now: float) -> Iterator[tuple[RequestKey, Submission]]:
        """What this rank waits for, for reports."""
        for each in list(self._waits):
            key = (STEP, each.name)
            yield key, Submission(key, str(each.place), now - each.since, each.detail)

    def copy(self) -> Mapping[str, int]:
        return dict(self.entered)
