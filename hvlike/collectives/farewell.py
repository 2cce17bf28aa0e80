"""How ranks part: nobody frees anything the others still need, and nobody waits for one that has gone.

A rank that is through (its program ended, or it called shutdown) tells rank 0 and stays reachable
until all are. When some have left and others go on, rank 0 tells those who has left, so that what
they ask for fails with an error instead of waiting for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvlike.errors import HorovodInternalError, PeerLeftError, ShutdownError
from hvlike.transport.fabric import Fabric
from hvlike.transport.routine import Routine, Wait

_TOPIC = 3
GRACE_SECONDS = 0.5
"""Ranks that end together are this close; only a longer absence is announced."""

EXIT, SHUTDOWN = "exit", "shutdown"


class Farewell:
    """The end of a job, seen from one rank."""

    def __init__(self, fabric: Fabric, on_gone: Callable[[dict[int, HorovodInternalError]], None]) -> None:
        """on_gone: told in the loop, on the ranks that go on, who has left and with which error."""
        self._fabric = fabric
        self._world = fabric.world
        self._on_gone = on_gone
        self._left: dict[int, str] = {}
        self._told: set[int] = set()
        self._telling = False
        self.all_left = False
        fabric.channel.listen(_TOPIC, lambda rank, letter, tensors: self._hear(rank, *letter))

    def part(self, reason: str) -> None:
        """Say that this rank is through, and wait, asleep, until all are. Every rank ends with this."""
        loop = self._fabric.loop
        loop.post(lambda: self._tell(0, "left", reason), wake=False)
        loop.wait(lambda: self.all_left and self._fabric.channel.quiet)

    def _tell(self, rank: int, what: str, value: Any) -> None:
        if rank == self._world.rank:
            self._hear(rank, what, value)
        else:
            self._fabric.channel.send(rank, _TOPIC, (what, value), kind="farewell")

    def _hear(self, rank: int, what: str, value: Any) -> None:
        if what == "left":
            self._left[rank] = value
            if len(self._left) == self._world.size:
                for each in range(self._world.size):
                    self._tell(each, "all left", None)
            elif not self._telling:
                self._telling = True
                self._fabric.loop.start(self._tell_the_rest(), wake=False)
        elif what == "gone":
            self._on_gone({each: _error(each, reason) for each, reason in value.items()})
        elif what == "all left":
            self.all_left = True

    def _tell_the_rest(self) -> Routine[None]:
        """On rank 0, while some have left and others have not."""
        while len(self._left) < self._world.size:
            until = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < until:
                yield Wait.BELL
            if len(self._left) < self._world.size and set(self._left) != self._told:
                self._told = set(self._left)
                # Rank 0 serves the others even after it has left itself, so it always hears this too.
                for rank in range(self._world.size):
                    if rank == 0 or rank not in self._left:
                        self._tell(rank, "gone", dict(self._left))


def _error(rank: int, reason: str) -> HorovodInternalError:
    if reason == SHUTDOWN:
        return ShutdownError(
            f"Horovod has been shut down on rank {rank}: it called hvd.shutdown() while other ranks went on. Call "
            "shutdown() on every rank, after the last collective."
        )
    return PeerLeftError(
        f"Rank {rank} has ended its program while other ranks go on. Every rank has to run the same number of "
        "collective operations and steps; look for a rank with less data or an early exit."
    )
