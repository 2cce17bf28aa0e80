"""All that is planned in one process set on this rank, and what stands in for it while the rank has joined."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableSet
from typing import Any

from hvlike.collectives.agreement import Verdict
from hvlike.collectives.compression import Mark
from hvlike.collectives.joining import PLANNED_KINDS
from hvlike.collectives.negotiator import Negotiator, stand_in
from hvlike.collectives.request import Request
from hvlike.collectives.schedule import Schedule
from hvlike.collectives.shadow import Planned, PlanShadow, Shadow
from hvlike.errors import HorovodInternalError, ShutdownError
from hvlike.planes.lane import Lane, Lanes


class Shadows:
    """The shadows of one process set while this rank has joined."""

    def __init__(self, lanes: Lanes, negotiator: Negotiator) -> None:
        self.planned: MutableSet[Planned] = weakref.WeakSet()
        """What this rank plans."""
        self._lanes = lanes
        self._negotiator = negotiator
        self._by_name: dict[str, Shadow] = {}
        self._missed = 0
        negotiator.stand_in = self._stand_in

    def plans(self, planned: Iterable[Planned]) -> frozenset[int]:
        """The serial numbers of the plans this rank takes part in."""
        return frozenset(each.serial for each in planned if each.serial is not None)

    def spare_lanes(self) -> frozenset[int]:
        """The lanes that are not used now, not even for the plan of an owner who is gone."""
        used = {each.lane.number for each in list(self._by_name.values())}
        return frozenset(self._lanes.spare_numbers()) - used

    def marks(self) -> Mapping[str, Mark]:
        """What this rank could plan anew, by name."""
        return {each.name: each.mark() for each in list(self.planned)}

    @property
    def missed(self) -> int:
        """How many steps with an active rank this rank has stood in for, of the plan that has had the most."""
        return max(self._missed, max((each.steps for each in list(self._by_name.values())), default=0))

    def begin(self, planned: Iterable[Planned]) -> None:
        """Take part in all this; in the loop."""
        self._missed = 0
        for each in planned:
            if each.serial is not None:
                self._add(each.name, each.shadow())

    def settled(self, plans: frozenset[int]) -> bool:
        """True when all shadows of these plans have seen the step without an active rank."""
        return all(each.finished for each in list(self._by_name.values()) if each.serial in plans)

    def end(self, plans: frozenset[int], spare_lanes: frozenset[int]) -> None:
        """All have joined: go on alike. Plans are forgotten on every rank, their lanes spare on every rank.

        In the loop.
        """
        missed = self.missed
        shadows, self._by_name = self._by_name, {}
        self._missed = missed
        healthy = set(spare_lanes)
        for shadow in shadows.values():
            if shadow.serial in plans and shadow.error is None:
                healthy.add(shadow.lane.number)
            else:
                shadow.cancel()
        for each in list(self.planned):
            each.forget()
        self._lanes.set_spare(healthy)
        self._negotiator.steps.clear()

    def steps(self) -> dict[str, int]:
        """How many steps of each plan this rank has entered and can complete, whatever its program does now."""
        lost = {each.name for each in list(self.planned) if not each.healthy}
        return {name: steps for name, steps in self._negotiator.steps.items() if name not in lost}

    def give_up(self) -> None:
        """The join failed; in the loop."""
        for shadow in list(self._by_name.values()):
            shadow.cancel()
        self._by_name = {}
        for each in list(self.planned):
            each.forget()

    def reset(self, spare_lanes: Iterable[int]) -> None:
        """Steps may be half done anywhere: forget all plans, on every rank; in the loop."""
        for each in list(self.planned):
            each.fail(ShutdownError("a Join context was left in the middle of this planned operation"))
        self.give_up()
        self._lanes.set_spare(spare_lanes)
        self._negotiator.steps.clear()

    def error(self) -> BaseException | None:
        """What went wrong in a shadow."""
        return next((each.error for each in list(self._by_name.values()) if each.error is not None), None)

    def _add(self, name: str, shadow: Shadow) -> None:
        before = self._by_name.get(name)
        if before is not None:
            self._missed = max(self._missed, before.steps)
            before.cancel()
        self._by_name[name] = shadow
        if not shadow.finished:
            shadow.begin()

    def _stand_in(self, verdict: Verdict) -> Request | None:
        if verdict.key[0] not in PLANNED_KINDS:
            return stand_in(verdict)
        return Request(verdict.key[1], verdict.signature, [], self._adopt)

    def _adopt(self, request: Request) -> Any:
        """The others have made a plan: take part in it."""
        lane, agreed = request.outputs
        self._add(request.name, self._shadow_of(request.name, lane, agreed))

    def _shadow_of(self, name: str, lane: Lane, agreed: Any) -> Shadow:
        own = next((each for each in list(self.planned) if each.name == name), None)
        if own is not None:
            return own.adopt(lane, agreed)
        return PlanShadow(Schedule(agreed, lane, agreed.portable))


def raise_first(errors: list[BaseException | None]) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        if error is not None:
            raise error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error)) from error
