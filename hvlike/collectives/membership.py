"""A registered process set on one of its members: group, lane, negotiator, executor."""

from __future__ import annotations

from typing import Any

from hvlike.collectives.execution import Executor
from hvlike.collectives.negotiator import Negotiator
from hvlike.errors import HorovodInternalError
from hvlike.planes.lane import Lanes, open_lane
from hvlike.transport.fabric import Fabric
from hvlike.transport.group import Group

_TOPIC = 2


class Membership:
    """What this rank needs to take part in the operations of one process set."""

    def __init__(self, fabric: Fabric, group: Group, switchboard: Switchboard, stall_seconds: float) -> None:
        """Collective over the group and blocking: connects the group and opens its first lane."""
        self.group = group
        self._fabric = fabric
        self._switchboard = switchboard
        group.connect()
        task = fabric.loop.start(open_lane(fabric, group, 0), wake=False)
        fabric.loop.wait(lambda: task.done)
        if task.error is not None or task.result is None:
            raise task.error or RuntimeError("no lane")
        self.lanes = Lanes(fabric, task.result)
        self.executor = Executor(self.lanes)
        self.negotiator = Negotiator(
            fabric,
            group,
            self.executor.run,
            lambda rank, what, value: switchboard.send(rank, group.number, what, value),
            stall_seconds,
        )
        switchboard.connect(group.number, self.negotiator)

    def fail(self, error: HorovodInternalError) -> None:
        """End everything in flight in this set with `error`; in the loop."""
        self.negotiator.close(error)
        for lane in self.lanes.all():
            lane.fail(error)

    def close(self) -> None:
        """Give back communicators. Collective over the group, after everything has ended."""
        self._switchboard.disconnect(self.group.number)
        for lane in self.lanes.all():
            lane.close()
        self.group.disconnect()


class Switchboard:
    """Brings the messages of negotiators to the one of the right process set."""

    def __init__(self, fabric: Fabric) -> None:
        self._channel = fabric.channel
        self._negotiators: dict[int, Negotiator] = {}
        self._early: dict[int, list[tuple[int, str, Any]]] = {}
        self._fabric = fabric
        fabric.channel.listen(_TOPIC, lambda rank, letter, tensors: self._deliver(rank, *letter))

    def send(self, rank: int, number: int, what: str, value: Any) -> None:
        """Send a message to the negotiator of set `number` on `rank`; from inside the loop."""
        self._channel.send(rank, _TOPIC, (number, what, value))

    def connect(self, number: int, negotiator: Negotiator) -> None:
        """Deliver to `negotiator` from now on, what came early first."""

        def deliver_early() -> None:
            self._negotiators[number] = negotiator
            for rank, what, value in self._early.pop(number, []):
                negotiator.hear(rank, what, value)

        self._fabric.loop.post(deliver_early)

    def disconnect(self, number: int) -> None:
        """Deliver nothing more."""
        self._negotiators.pop(number, None)

    def _deliver(self, rank: int, number: int, what: str, value: Any) -> None:
        negotiator = self._negotiators.get(number)
        if negotiator is None:
            # A peer can be through with registering the set before this rank is.
            self._early.setdefault(number, []).append((rank, what, value))
        else:
            negotiator.hear(rank, what, value)
