"""The end of a job: no rank frees what others still need, and none waits for a rank that has left.

A rank that is done (its program ended, or it called shutdown) tells rank 0 and stays reachable until all are. The first
rank of each node speaks for the node, so that rank 0 hears one message from each. When some have left and others go on,
rank 0 tells those who has left, and what needs the missing ranks fails with an error. It does so once every rank has
answered: one that stands still may have a part in what others wait for, and those that have left have done theirs.
Ranks that have left sleep; from time to time rank 0 reports where the others are.

When all have left, a rank may still have messages to pass on, which it got before. So each stays until all have sent
what they had to send: MPI may keep a send until its receiver takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hvlike.collectives.health.departures import Ending, Errors
from hvlike.collectives.health.stall_inspector import ANSWER_SECONDS, StallLimits, StatusQuery, answer_of
from hvlike.collectives.requests.message_table import name_ranks, tree_of
from hvlike.errors import HorovodInternalError, PeerLeftError, ShutdownError, StalledError
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Wait, complete, in_loop, pause
from hvlike.transport.messages.traffic import Topic

logger = logging.getLogger("hvlike")


class MissingRanksReport:
    """On rank 0: asks the ranks that have not come to the end where they are, and reports it. In the loop."""

    def __init__(self, limits: StallLimits, query: StatusQuery) -> None:
        self._limits = limits
        self._query = query
        self._began = system.monotonic()
        self._next = self._began + (limits.shortest or 0.0)

    @property
    def is_due(self) -> bool:
        return self._limits.shortest is not None and system.monotonic() >= self._next

    def inspect(self, missing: Callable[[], Collection[int]]) -> Coroutine[StalledError | None]:
        """Ask who is missing, and report; the error once the wait is past its limit."""
        self._query.prepare(missing())
        self._query.send()
        until = system.monotonic() + ANSWER_SECONDS
        while system.monotonic() < until and not set(self._query.silent()).isdisjoint(missing()):
            yield Wait.NOTIFY
        now = system.monotonic()
        self._next = now + (self._limits.shortest or 0.0)
        absent = sorted(missing())
        if not absent:
            return None
        waited = now - self._began
        text = (
            f"Other ranks have ended their program, or called shutdown(), {waited:.0f} s ago; {name_ranks(absent)} "
            f"{'has' if len(absent) == 1 else 'have'} not.\n" + "\n".join(self._query.describe(absent))
        )
        return self._limits.judge(text, waited)


NODE_GRACE_SECONDS = 0.25  # Ranks of a node that end together are this close, and are told to rank 0 together
GRACE_SECONDS = 0.5  # Ranks that end together are this close; only a longer absence is announced
FAIL_SECONDS = 1.0  # What was sent before a process was gone has come by then


class ShutdownBarrier:
    def __init__(self, fabric: Fabric, on_gone: Callable[[Errors], None], limits: StallLimits) -> None:
        """on_gone: called in the loop, on the ranks that go on, with the error of each rank that has left."""
        self._fabric = fabric
        self._world = fabric.world
        self._on_gone = on_gone
        self._limits = limits
        self._parent, self._children = tree_of(self._world.nodes, self._world.rank)
        self._left: dict[int, str] = {}  # Of those that this rank speaks for
        self._told: set[int] = set()
        self._telling = False
        self._reach = 0  # The number of the last question whether all ranks answer
        self._unreached: set[int] = set()  # Of those to whom this rank has passed it on
        self._query = StatusQuery(lambda rank, asked: self._tell(rank, "where", asked), fabric.look_at)
        self._error: HorovodInternalError | None = None
        self._all_left = self._lost = False
        self._handlers: dict[str, Callable[[int, Any], None]] = {
            "left": self._hear_left,
            "gone": self._hear_gone,
            "all left": self._hear_all_left,
            "reach": self._hear_reach,
            "reached": self._hear_reached,
            "where": lambda rank, asked: self._tell(rank, "here", answer_of(asked)),
            "here": self._query.hear,
            "stalled": self._hear_stalled,
        }
        fabric.channel.listen(Topic.SHUTDOWN, lambda rank, message, tensors: self._hear(rank, *message))

    def part(self, ending: Ending) -> None:
        """Say that this rank is done, and sleep until all are. Raises: StalledError past the limit, what `fail` got."""
        loop = self._fabric.loop
        loop.post(lambda: self._hear(self._world.rank, "left", {self._world.rank: ending.value}), wake=False)
        began = system.monotonic()
        while not loop.wait(self._is_over, self._limits.shortest):
            if self._world.rank != 0:
                self._look_for_first_rank(system.monotonic() - began)
        if self._error is not None:
            raise self._error
        if not self._lost:
            barrier = loop.start(self._barrier(), wake=False)
            loop.wait(lambda: barrier.done or self._lost)

    def _barrier(self) -> Coroutine[None]:
        yield from complete([self._world.comm.Ibarrier()])

    @in_loop
    def lose(self) -> None:
        """A rank is lost: the others do not wait for all any more."""
        self._all_left = self._lost = True

    def fail(self, error: HorovodInternalError) -> Coroutine[None]:
        """A rank is lost, and nothing goes on without it: who waits for all gets this error. In the loop."""
        # That all have left may be on its way: then this rank has only ended before.
        yield from pause(FAIL_SECONDS)
        if self._all_left:
            self._lost = True
        else:
            self._error = error

    def _is_over(self) -> bool:
        # What was sent to a lost rank may never leave.
        return self._error is not None or self._lost or (self._all_left and self._fabric.channel.quiet)

    def _look_for_first_rank(self, waited: float) -> None:
        loop, query = self._fabric.loop, self._query
        query.prepare([0])
        loop.post(query.send, wake=False)
        if loop.wait(lambda: self._is_over() or not query.silent(), ANSWER_SECONDS):
            return
        text = (
            f"{self._world} has ended its program, or called shutdown(), {waited:.0f} s ago and waits for the others. "
            f"Rank 0, which knows for whom, does not answer; {self._fabric.look_at(0)}"
        ).removesuffix("; ")
        # A rank 0 that was only busy has answered before.
        self._error = self._limits.judge(text, waited, min(waited, query.asked - query.heard_at(0)))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank not in self._left]

    def _tell(self, rank: int, what: str, value: Any) -> None:
        if rank == self._world.rank:
            self._hear(rank, what, value)
        else:
            self._fabric.channel.send(rank, Topic.SHUTDOWN, (what, value), kind="shutdown")

    @in_loop
    def _hear(self, rank: int, what: str, value: Any) -> None:
        self._handlers[what](rank, value)

    def _hear_left(self, rank: int, endings: dict[int, str]) -> None:
        """Ranks below this one are done, itself perhaps."""
        self._left.update(endings)
        if len(self._left) == len(self._below(self._world.rank)):
            self._all_below_left()
        elif not self._telling:
            self._telling = True
            is_first = self._world.rank == 0
            self._fabric.loop.start(self._tell_the_rest() if is_first else self._tell_parent(), wake=False)

    def _hear_gone(self, rank: int, endings: dict[int, str]) -> None:
        """These ranks have left; this one goes on."""
        me = self._world.rank
        self._pass_on("gone", endings, [each for each in self._below(me) if each not in self._left])
        if me == 0 or me not in self._left:
            self._on_gone({each: _error(each, Ending(ending)) for each, ending in endings.items()})

    def _hear_all_left(self, rank: int, value: None) -> None:
        self._pass_on("all left", value, self._below(self._world.rank))
        self._all_left = True

    def _hear_reach(self, rank: int, question: int) -> None:
        self._reach, self._unreached = question, set(self._children)
        for child in self._children:
            self._tell(child, "reach", question)
        self._tell_if_reached()

    def _hear_reached(self, rank: int, question: int) -> None:
        if question == self._reach:
            self._unreached.discard(rank)
            self._tell_if_reached()

    def _hear_stalled(self, rank: int, error: StalledError) -> None:
        self._pass_on("stalled", error, self._left)
        if self._world.rank in self._left:
            self._error = error

    def _below(self, rank: int) -> Sequence[int]:
        """The ranks that this one speaks for, itself among them."""
        if rank == 0:
            return range(self._world.size)
        return next((node for node in self._world.nodes if node[0] == rank), (rank,))

    def _pass_on(self, what: str, value: Any, ranks: Collection[int]) -> None:
        """Tell these ranks below this one, through those that speak for them."""
        for child in self._children:
            if any(each in ranks for each in self._below(child)):
                self._tell(child, what, value)

    def _all_below_left(self) -> None:
        if self._world.rank == 0:
            self._hear(0, "all left", None)
        else:
            self._tell(self._parent, "left", dict(self._left))

    def _tell_if_reached(self) -> None:
        if not self._unreached and self._world.rank != 0:
            self._tell(self._parent, "reached", self._reach)

    def _reach_all(self) -> Coroutine[bool]:
        """On rank 0: whether all ranks answer now."""
        self._hear(0, "reach", self._reach + 1)
        until = system.monotonic() + ANSWER_SECONDS
        while self._unreached and system.monotonic() < until:
            yield Wait.NOTIFY
        return not self._unreached

    def _tell_parent(self) -> Coroutine[None]:
        """On a rank that speaks for others, while some of them have left and others have not."""
        everybody = len(self._below(self._world.rank))
        while len(self._left) < everybody:
            yield from pause(NODE_GRACE_SECONDS)
            if len(self._left) < everybody and set(self._left) != self._told:
                self._told = set(self._left)
                self._tell(self._parent, "left", dict(self._left))

    def _tell_the_rest(self) -> Coroutine[None]:
        """On rank 0, while some have left and others have not."""
        report = MissingRanksReport(self._limits, self._query)
        while len(self._left) < self._world.size:
            yield from pause(GRACE_SECONDS)
            news = set(self._left) != self._told
            if news and len(self._left) < self._world.size and (yield from self._reach_all()):
                self._told = set(self._left)
                # Rank 0 serves the others even after it has left itself, so it always hears this too.
                self._hear(0, "gone", dict(self._left))
            if report.is_due:
                error = yield from report.inspect(self._missing)
                if error is not None:
                    self._hear(0, "stalled", error)


def _error(rank: int, ending: Ending) -> HorovodInternalError:
    if ending is Ending.SHUTDOWN:
        return ShutdownError(
            f"hvlike: Horovod has been shut down on rank {rank}: it called hvd.shutdown() while other ranks went on. "
            "Call shutdown() on every rank, after the last collective."
        )
    return PeerLeftError(
        f"Rank {rank} has ended its program while other ranks go on. Every rank has to run the same number of "
        "collective operations and steps; look for a rank with less data (hvlike.join.Join and hvd.join() are for "
        "such) or an early exit."
    )
