"""A clock that all ranks share: the time since the job began."""

from __future__ import annotations

import time

from hvlike.transport.world import World


def agree_on_clock(world: World) -> int:
    """Nanoseconds to add to time.monotonic_ns() for the time since the job began.

    Collective and blocking. Ranks of one node share the monotonic clock of the machine and get the same offset; nodes
    are as far apart as their wall clocks.
    """
    offset: int = world.node_comm.bcast(time.time_ns() - time.monotonic_ns(), root=0)
    began: int = world.comm.bcast(time.time_ns(), root=0)
    return offset - began
