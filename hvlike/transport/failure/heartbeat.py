"""The heartbeat between nodes: which nodes give no sign any more, and which side of a cut network goes on.

MPI notices a process that has ended. It does not notice a cut link, nor a host that is frozen: their TCP connections
stay open for minutes. So every rank tells some ranks of other nodes, a few times within the limit, how late it was on
each node when that was last heard of. The news spreads from node to node as gossip does: what a node has to send does
not grow with the square of their number, and a node is heard of as long as one of its ranks runs.

    rank of node A --- [A: 17.2  B: 9.0  C: 4.1] --> rank of node B      the latest clock of each node, by its own clock
    rank of node B --- [A: 17.2  B: 9.3  C: 4.1] --> rank of node C

One rank of a node gets such a message; the others read it in shared memory, where each rank writes what it has heard.
So no rank hears less than its node. Without that, on two nodes with 8 ranks each, some rank would hear nothing of the
other node for the whole limit about every 20 minutes.

A node whose clock stands still for the limit is lost. Those who see that go on when they are the majority (`goes_on`);
the others end, so that two halves never train on. `HVLIKE_HEARTBEAT_SECONDS` is the limit.

On its own node each rank also looks at its neighbour: a process that was stopped (SIGSTOP) for the limit is killed, and
then it is lost as any other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
from collections.abc import Callable, Collection, Iterable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from hvlike.errors import HorovodInternalError, PeerLeftError
from hvlike.system.system import system
from hvlike.transport.failure import fault_tolerance, watchdog
from hvlike.transport.failure.guard import Guard
from hvlike.transport.messages.traffic import Topic

if TYPE_CHECKING:
    from hvlike.transport.fabric import Fabric

DEFAULT_SECONDS = 30.0
"""The limit where ranks that are lost can be done without: far above the longest that Python keeps a rank's threads
from running, far below the quarter of an hour that TCP waits."""

BEATS = 8  # Of each rank within the limit
_LOST = (1 << 64) - 1  # In the place of a clock

logger = logging.getLogger("hvlike")


def heartbeat_limit(chosen: float | None, *, nodes: int) -> float:
    """The limit in seconds, 0 for none. chosen: by the user, None if he has not."""
    if chosen is None:
        return DEFAULT_SECONDS if nodes > 1 and fault_tolerance.is_enabled(os.environ) else 0.0
    return chosen


def goes_on(nodes: Sequence[Sequence[int]], lost: Collection[int]) -> bool:
    """Whether the ranks of `nodes` without the nodes numbered `lost` are the side that goes on: more than half of the
    ranks; of two halves the one with the lowest rank.
    """
    left = [rank for number, node in enumerate(nodes) if number not in lost for rank in node]
    everybody = [rank for node in nodes for rank in node]
    twice = 2 * len(left)
    return twice > len(everybody) or (twice == len(everybody) and min(everybody) in left)


class Hearing:
    """What one rank has heard of the nodes. Only time in which it has looked itself counts as their silence: a process
    that was stopped for a minute does not take the others for lost when it goes on.
    """

    def __init__(self, nodes: int, own: int, limit: float, now: float) -> None:
        self.clocks: list[float] = [0] * nodes  # The latest of each node, in microseconds of its own clock; 0: none
        self._own, self._limit = own, limit
        self._silence = [0.0] * nodes  # Seconds
        self._looked = now
        self._told: set[int] = set()  # Nodes that another rank of this node takes for lost
        self.lost: set[int] = set()

    def hear(self, clocks: Sequence[float]) -> None:
        """Take over the news of another rank."""
        for node, clock in enumerate(clocks):
            if clock > self.clocks[node]:
                self.clocks[node], self._silence[node] = clock, 0.0

    def write(self, row: MutableSequence[int] | memoryview) -> None:
        """Write down what this rank has heard, a word for each node, for the others of its own."""
        for node, clock in enumerate(self.clocks):
            row[node] = _LOST if node in self.lost else int(clock)

    def read(self, row: Iterable[int]) -> None:
        """Take over what another rank of this node has written."""
        words = list(row)
        self.hear([0 if word == _LOST else word for word in words])
        self._told.update(node for node, word in enumerate(words) if word == _LOST)

    def look(self, now: float) -> set[int]:
        """Return the nodes that are lost from now on, each once. Nodes that were cut off together are lost together:
        each of the others has to be heard once more, or has to be lost, too.
        """
        passed, self._looked = min(now - self._looked, self._limit / BEATS), now
        self.clocks[self._own] = int(1e6 * now)
        for node in range(len(self.clocks)):
            if node != self._own and node not in self.lost:
                self._silence[node] += passed
        silent = self._silent_for(self._limit)
        since = max((self._silence[node] - self._limit for node in silent), default=0.0)
        if silent != self._silent_for(since):
            silent = set()
        silent |= self._told - self.lost
        self.lost |= silent
        return silent

    def conclude(self) -> set[int]:
        """Return the nodes that are lost if nothing is heard from now on: those that were silent for half the limit."""
        silent = self._silent_for(self._limit / 2) | (self._told - self.lost)
        self.lost |= silent
        return silent

    def _silent_for(self, seconds: float) -> set[int]:
        others = {node for node, silence in enumerate(self._silence) if silence >= seconds}
        return others - {self._own, *self.lost}


class Heartbeat:
    """The heartbeat of one rank. `tick` is called a few times a second in the loop; all calls are local."""

    def __init__(
        self, fabric: Fabric, guard: Guard, limit: float, lose: Callable[[dict[int, HorovodInternalError]], None]
    ) -> None:
        """guard: ends this process where it is not to go on. lose: called in the loop with the errors of lost ranks."""
        self._world = world = fabric.world
        self._channel, self._nodes, self._limit = fabric.channel, world.nodes, limit
        self._guard, self._lose = guard, lose
        own = next(number for number, node in enumerate(world.nodes) if world.rank in node)
        self._hearing = Hearing(len(world.nodes), own, limit, system.monotonic())
        self._others = [number for number in range(len(world.nodes)) if number != own]
        count, words = len(world.nodes), fabric.signs_of_life
        rows = [words[first : first + count] for first in range(0, count * world.local_size, count)]
        self._row = rows.pop(world.local_rank)
        self._rows = rows  # Of the other ranks of this node
        # What the user draws from the global generator stays what it was.
        self._random = random.Random(world.rank)
        self._next = 0.0
        neighbour = fabric.local_ranks[(world.local_rank + 1) % world.local_size]
        # Only where processes have the same numbers for each other: no other one must be killed.
        watches = neighbour != world.rank and fabric.reaches_peers
        self._neighbour = StoppedProcess(neighbour, fabric.bells[neighbour].process, limit) if watches else None
        self._channel.listen(Topic.HEARTBEAT, self._hear)

    def tick(self) -> None:
        now = system.monotonic()
        if now >= self._next:
            self._next = now + self._limit / BEATS
            if self._neighbour is not None:
                self._neighbour.look(now)
            self._read()
            for node in self._listeners():
                self._channel.send(
                    self._random.choice(self._nodes[node]), Topic.HEARTBEAT, self._hearing.clocks, kind="heartbeat"
                )
        ranks = self._ranks_of(self._hearing.look(now))
        if ranks:
            self._hearing.write(self._row)
            self._end_or_tell(ranks)
            self._lose({rank: PeerLeftError(self._describe(ranks)) for rank in ranks})

    def conclude(self) -> None:
        """hvlike is given up here, to start again without lost ranks: nothing will be heard any more. Another rank may
        have noticed first, and MPI would wait for those that were cut off.
        """
        self._read()
        ranks = self._ranks_of(self._hearing.conclude())
        if ranks:
            self._end_or_tell(ranks)

    def _ranks_of(self, nodes: Collection[int]) -> list[int]:
        return sorted(rank for node in nodes for rank in self._nodes[node])

    def _end_or_tell(self, ranks: Sequence[int]) -> None:
        """End this process where it is not to go on; else have MPI go on without these ranks."""
        text = self._describe(ranks)
        if not goes_on(self._nodes, self._hearing.lost):
            side = "this rank is not on the side of the majority, and ends, so that only one side trains on"
            self._guard.end_process(f"hvlike: {text}; {side}", text)
        if self._world.job is None or not self._world.job.lose(self._world.comm, ranks):
            self._guard.end_job(f"hvlike: {text}; the job ends", text)

    def _listeners(self) -> list[int]:
        """The nodes that are told this time: all of a few, of many so many that all have the news after some beats."""
        nodes = [node for node in self._others if node not in self._hearing.lost]
        return self._random.sample(nodes, min(len(nodes), 1 + math.ceil(math.log2(1 + len(nodes)))))

    def _hear(self, rank: int, clocks: Sequence[float], tensors: list[Any]) -> None:
        self._hearing.hear(clocks)
        self._hearing.write(self._row)

    def _read(self) -> None:
        for row in self._rows:
            self._hearing.read(row)

    def _describe(self, ranks: Sequence[int]) -> str:
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return (
            f"Nothing was heard of {named} for {self._limit:g} s (HVLIKE_HEARTBEAT_SECONDS): the network is cut, or "
            "the host is down or frozen"
        )


class StoppedProcess:
    """Kills a rank of this node that was stopped for the limit. One that a debugger holds is left alone."""

    def __init__(self, rank: int, process: int, limit: float) -> None:
        self._rank, self._process, self._limit = rank, process, limit
        self._since = math.inf
        self._looked = math.inf

    def look(self, now: float) -> None:
        # Of time in which this process did not run itself nothing counts.
        interrupted = now - self._looked > self._limit / 2
        self._looked = now
        if not watchdog.process_status(self._process).get("State", "").startswith("T") or interrupted:
            self._since = math.inf
            return
        self._since = min(self._since, now)
        if now - self._since >= self._limit:
            logger.error(
                "rank %d (process %d) was stopped (SIGSTOP) for %g s: it is killed (HVLIKE_HEARTBEAT_SECONDS)",
                self._rank,
                self._process,
                now - self._since,
            )
            with contextlib.suppress(ProcessLookupError):
                system.kill(self._process, signal.SIGKILL)
