"""What takes part in the planned reductions of the others for a rank that has joined."""

from __future__ import annotations

import weakref
from collections.abc import MutableSet
from typing import TYPE_CHECKING, Any

from hvlike.collectives.agreement import Verdict
from hvlike.collectives.negotiator import Negotiator, stand_in
from hvlike.collectives.request import Request
from hvlike.collectives.schedule import Schedule
from hvlike.errors import HorovodInternalError, ShutdownError
from hvlike.planes.lane import Lanes
from hvlike.transport.task import Task

if TYPE_CHECKING:
    from hvlike.collectives.planned import PlannedReducer


class Shadow:
    """Runs the steps of one plan with zeros, until a step has no active rank. Lives in the loop."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.finished = not schedule.buckets
        self.error: BaseException | None = None
        self._tensors = [schedule.zeros(number) for number in range(len(schedule.buckets))]
        self._left = 0

    def begin(self) -> None:
        """Enter the next step; it ends when all ranks have entered it."""
        self._left = len(self._tensors)
        for number, tensors in enumerate(self._tensors):
            self.schedule.start(number, tensors, self._ended, active=False, wake=False)

    def cancel(self) -> None:
        """Leave for good: the others have given this plan up."""
        if not self.finished:
            self.finished = True
            self.schedule.lane.fail(ShutdownError("the ranks that go on have given this planned reduction up"))

    def _ended(self, task: Task[None]) -> None:
        self._left -= 1
        self.error = self.error or task.error
        if self._left or self.finished:
            return
        if self.error is not None or not self.schedule.active:
            self.finished = True
            self.schedule.roll_back()
            return
        self.schedule.commit()
        for tensors in self._tensors:
            for tensor in tensors:
                tensor.zero_()
        self.begin()


class Shadows:
    """The shadows of one process set while this rank has joined."""

    def __init__(self, lanes: Lanes, negotiator: Negotiator) -> None:
        self.reducers: MutableSet[PlannedReducer] = weakref.WeakSet()
        """The planned reductions of this rank."""
        self._lanes = lanes
        self._negotiator = negotiator
        self._by_name: dict[str, Shadow] = {}
        negotiator.stand_in = self._stand_in

    def plans(self) -> frozenset[int]:
        """The serial numbers of the plans this rank takes part in."""
        return frozenset(each.schedule.serial for each in self.reducers if each.schedule is not None)

    def begin(self) -> None:
        """Take part in everything that is planned; in the loop."""
        for reducer in self.reducers:
            if reducer.schedule is not None:
                self._add(reducer.name, reducer.schedule)

    def settled(self, plans: frozenset[int]) -> bool:
        """True when all shadows of these plans have seen the step without an active rank."""
        return all(each.finished for each in self._by_name.values() if each.schedule.serial in plans)

    def end(self, plans: frozenset[int], spare_lanes: frozenset[int]) -> None:
        """All have joined: go on alike. Plans are forgotten on every rank, their lanes spare on every rank.

        In the loop.
        """
        shadows, self._by_name = self._by_name, {}
        healthy = set(spare_lanes)
        for shadow in shadows.values():
            if shadow.schedule.serial in plans and shadow.error is None:
                healthy.add(shadow.schedule.lane.number)
            else:
                shadow.cancel()
        for reducer in self.reducers:
            reducer.forget()
        self._lanes.set_spare(healthy)
        self._negotiator.steps.clear()

    def give_up(self) -> None:
        """The join failed."""
        for shadow in self._by_name.values():
            shadow.cancel()
        self._by_name = {}
        for reducer in self.reducers:
            reducer.forget()

    def error(self) -> BaseException | None:
        """What went wrong in a shadow."""
        return next((each.error for each in self._by_name.values() if each.error is not None), None)

    def _add(self, name: str, schedule: Schedule) -> None:
        before = self._by_name.get(name)
        if before is not None:
            before.cancel()
        shadow = self._by_name[name] = Shadow(schedule)
        shadow.begin()

    def _stand_in(self, verdict: Verdict) -> Request | None:
        if verdict.key[0] != "plan":
            return stand_in(verdict)
        return Request(verdict.key[1], verdict.signature, [], self._adopt)

    def _adopt(self, request: Request) -> Any:
        """The others have made a plan: take part in it."""
        lane, agreed = request.outputs
        self._add(request.name, Schedule(agreed, lane, agreed.portable))


def raise_first(errors: list[BaseException | None]) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        if error is not None:
            raise error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error)) from error
