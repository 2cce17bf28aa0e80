"""A registered process set on one of its members: group, lanes, negotiator, executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvlike.collectives.execution import Executor
from hvlike.collectives.express import ExpressAllreduce, ways
from hvlike.collectives.inspection import StallLimits
from hvlike.collectives.negotiator import Negotiator
from hvlike.collectives.rounds import Rounds
from hvlike.collectives.shadows import Shadows
from hvlike.collectives.trace import Trace
from hvlike.config import Knobs
from hvlike.errors import HorovodInternalError
from hvlike.planes.express import open_express
from hvlike.planes.lane import Lane, Lanes, open_lane
from hvlike.transport.fabric import Fabric
from hvlike.transport.group import Group
from hvlike.transport.routine import Routine

_TOPIC = 2


class Membership:
    """What this rank needs to take part in the operations of one process set."""

    def __init__(
        self,
        fabric: Fabric,
        group: Group,
        first: Lane,
        switchboard: Switchboard,
        knobs: Knobs,
        end: Callable[[HorovodInternalError], None],
    ) -> None:
        """first: the lane of negotiated requests; end: ends everything on this rank with an error."""
        self.group = group
        self.lanes = Lanes(fabric, first)
        trace = Trace(fabric.recorder, group)
        self.express: ExpressAllreduce | None = None
        """The express way, once the set has reduced a few tensors; None where its ranks are not all on one node."""
        self._fabric = fabric
        opening = self._open_express if group.size > 1 and len(group.nodes) == 1 and knobs.express else None
        self.executor = Executor(self.lanes, trace, knobs, opening)
        self._switchboard = switchboard
        self.negotiator = Negotiator(
            fabric,
            group,
            self.executor.run,
            lambda rank, what, value: switchboard.send(rank, group.number, what, value),
            end,
            stall_limits(knobs),
            knobs.cache_capacity,
            knobs.cycle_time / 1000,
            trace,
        )
        self.shadows = Shadows(self.lanes, self.negotiator)
        self.rounds = Rounds(self.shadows, self.negotiator, fabric.loop.perform)
        switchboard.connect(group.number, self.negotiator)

    def _open_express(self) -> Routine[None]:
        """Make the express way. Collective over the group."""
        lane = yield from self.lanes.take(-1)
        express = yield from open_express(self._fabric, self.group, lane)
        if express is not None:
            group = self.group
            self.express = ExpressAllreduce(self.negotiator, express, self._fabric.recorder, group.size, group.rank)
            ways[group.number] = self.express

    def fail(self, error: HorovodInternalError) -> None:
        """End everything in flight in this set with `error`; in the loop."""
        ways.pop(self.group.number, None)
        self.negotiator.close(error)
        for lane in self.lanes.all():
            lane.fail(error)

    def close(self) -> None:
        """Give back communicators. Collective over the group, after everything has ended."""
        self._switchboard.disconnect(self.group.number)
        for lane in self.lanes.all():
            lane.close()
        self.executor.close()
        self.group.disconnect()


def open_membership(
    fabric: Fabric,
    group: Group,
    switchboard: Switchboard,
    knobs: Knobs,
    end: Callable[[HorovodInternalError], None],
) -> Routine[Membership]:
    """Make what a member of `group` needs. Collective over the group; groups in the same order everywhere.

    On several nodes it makes communicators, which blocks until all members are here: they are on the way.
    """
    group.connect()
    lane = yield from open_lane(fabric, group, 0)
    return Membership(fabric, group, lane, switchboard, knobs, end)


def stall_limits(knobs: Knobs) -> StallLimits:
    """The limits of the stall inspector from the knobs."""
    if knobs.stall_check_disable:
        return StallLimits(None, 0.0)
    return StallLimits(knobs.stall_check_seconds, knobs.stall_shutdown_seconds)


class Switchboard:
    """Brings the messages of negotiators to the one of the right process set."""

    def __init__(self, fabric: Fabric) -> None:
        self._channel = fabric.channel
        self._negotiators: dict[int, Negotiator] = {}
        self._early: dict[int, list[tuple[int, str, Any]]] = {}
        self._newest = -1
        self._fabric = fabric
        fabric.channel.listen(_TOPIC, lambda rank, letter, tensors: self._deliver(rank, *letter))

    def send(self, rank: int, number: int, what: str, value: Any) -> None:
        """Send a message to the negotiator of set `number` on `rank`; from inside the loop."""
        self._channel.send(rank, _TOPIC, (number, what, value), kind=what)

    def connect(self, number: int, negotiator: Negotiator) -> None:
        """Deliver to `negotiator` from now on, what came early first. In the loop; sets in rising order."""
        self._newest = number
        self._negotiators[number] = negotiator
        for rank, what, value in self._early.pop(number, []):
            negotiator.hear(rank, what, value)

    def disconnect(self, number: int) -> None:
        """Deliver nothing more."""
        self._negotiators.pop(number, None)

    def _deliver(self, rank: int, number: int, what: str, value: Any) -> None:
        negotiator = self._negotiators.get(number)
        if negotiator is not None:
            negotiator.hear(rank, what, value)
        elif number > self._newest:
            # A peer can be through with registering the set before this rank is.
            self._early.setdefault(number, []).append((rank, what, value))
