"""Looking after what GPUs do while nobody waits for them: an error there is an error on every rank, not a hang."""

from __future__ import annotations

from collections.abc import Mapping

from hvlike.collectives.membership import Membership
from hvlike.errors import HorovodInternalError
from hvlike.transport.fabric import Fabric

_TOPIC = 7


class LaneWatch:
    """Ends lanes whose device has failed, here and on the other ranks. In the loop."""

    def __init__(self, fabric: Fabric, memberships: Mapping[int, Membership]) -> None:
        self._fabric = fabric
        self._memberships = memberships
        fabric.channel.listen(_TOPIC, lambda rank, letter, tensors: self._hear(rank, *letter))

    def look(self, now: float) -> None:
        """See whether anything has gone wrong, and tell the others; a few times a second. now: time.monotonic()."""
        for number, membership in self._memberships.items():
            for lane in membership.lanes.all():
                error = lane.watch(now)
                if error is None:
                    continue
                for rank in membership.group.ranks:
                    if rank != self._fabric.world.rank:
                        self._fabric.channel.send(rank, _TOPIC, (number, lane.number, error), kind="device")

    def _hear(self, rank: int, number: int, lane: int, error: HorovodInternalError) -> None:
        membership = self._memberships.get(number)
        lanes = () if membership is None else membership.lanes.all()
        if lane < len(lanes) and lanes[lane].broken is None:
            lanes[lane].fail(type(error)(f"on rank {rank}: {error}"))
