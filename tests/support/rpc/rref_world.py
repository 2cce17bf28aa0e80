"""A few simulated workers with the lifetime protocol of RRefs: messages are delivered when a test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hvlike.rpc.rrefs.lifetime import DROPPED, Fork, GlobalId, Lifetime, OwnedValue, Ticket


class Step(NamedTuple):
    """A message on its way, or something that goes on inside a worker."""

    source: int
    to: int
    happen: Callable[[], None]
    overtakes: bool = True
    """False for notices and fetches: those of one worker to another arrive in order."""


class World:
    """Workers without MPI and threads; `flying` and `running` are what has not happened yet."""

    def __init__(self, size: int) -> None:
        self.workers = [Lifetime(rank) for rank in range(size)]
        self.held: list[tuple[int, OwnedValue | Fork]] = []
        """The RRef objects that programs hold, with their worker."""
        self.flying: list[Step] = []
        self.running: list[Step] = []
        self.made: dict[GlobalId, OwnedValue] = {}
        """The one entry each value ever had."""
        self.carried: list[tuple[GlobalId, int]] = []
        """RRefs inside messages that carry one, and their owners."""
        self.unanswered: Counter[tuple[int, int]] = Counter()
        """Fetches without an answer: who has asked whom."""
        self.unconfirmed = 0
        """Forks whose receiver waits for their confirmation."""
        self.lost: int | None = None
        """The worker that has been lost."""

    # -- what programs do -----------------------------------------------------------------------

    def local(self, rank: int) -> None:
        """RRef(value)."""
        entry = OwnedValue(self.workers[rank].new_id(), created=True)
        self.workers[rank].settle(entry, "local", None)
        self.made[entry.id] = entry
        self.held.append((rank, entry))

    def remote(self, rank: int, owner: int) -> None:
        """rpc.remote; its acknowledgement may be overtaken by its time limit."""
        worker = self.workers[rank]
        rref = worker.new_id()
        if rank == owner:
            entry = self.made[rref] = worker.create(rref, None, rank)
            self.held.append((rank, entry))
            self.flying.append(Step(rank, rank, partial(self._begin, rank, rref, None)))
            return
        fork = Fork(rref, worker.new_id(), owner)
        worker.begin(fork)
        self.held.append((rank, fork))
        self.flying.append(Step(rank, owner, partial(self._create, fork, rank)))
        self.running.append(Step(rank, rank, partial(self._acknowledge, rank, fork)))

    def send(self, held: tuple[int, OwnedValue | Fork], to: int, *, fails: bool = False) -> None:
        """An RRef as an argument or result."""
        rank, rref = held
        ticket = self.workers[rank].send(rref, to)
        if fails:
            self.workers[rank].unsend(rref, ticket)
        else:
            self.carried.append((ticket.rref, ticket.owner))
            self.flying.append(Step(rank, to, partial(self._receive, Ticket.unpack(ticket.pack()), rank, to)))
        self._carry_out(rank)

    def fetch(self, held: tuple[int, OwnedValue | Fork]) -> None:
        """to_here, whose caller may give up and drop the RRef before the request has arrived."""
        rank, fork = held
        if isinstance(fork, Fork):
            self.unanswered[rank, fork.owner] += 1
            self.flying.append(Step(rank, fork.owner, partial(self._fetch, fork, rank), overtakes=False))

    def drop(self, held: tuple[int, OwnedValue | Fork]) -> None:
        """The finaliser of an RRef object."""
        rank, rref = held
        self.held.remove(held)
        if isinstance(rref, Fork):
            self._notify(rank, rank, DROPPED, (tuple(rref.id),))

    def lose(self, rank: int) -> None:
        """A worker is gone, with all that it was doing and all messages to and from it."""
        self._end(rank)
        self.flying = [step for step in self.flying if rank != step.source]
        for survivor in self.survivors():
            self._forget(survivor)

    def leave(self, rank: int) -> None:
        """A worker has left: what it has sent still arrives, and after its notices each of the others hears of it."""
        self._end(rank)
        for survivor in self.survivors():
            self.flying.append(Step(rank, survivor, partial(self._forget, survivor), overtakes=False))

    def _end(self, rank: int) -> None:
        self.lost = rank
        self.held = [held for held in self.held if held[0] != rank]
        self.flying = [step for step in self.flying if rank != step.to]
        self.running = [step for step in self.running if step.to != rank]

    def _forget(self, survivor: int) -> None:
        assert self.lost is not None
        self.workers[survivor].forget(self.lost, RuntimeError("lost"))
        self._carry_out(survivor)

    def survivors(self) -> list[int]:
        """The workers that are there."""
        return [rank for rank in range(len(self.workers)) if rank != self.lost]

    def run_out(self, choose: Callable[[int], int]) -> None:
        """Let everything happen that has been begun, in the order of choice."""
        while self.flying or self.running:
            if self.flying:
                self.deliver(choose(len(self.flying)))
            else:
                self.running.pop(choose(len(self.running))).happen()

    def deliver(self, place: int) -> None:
        """Let a message arrive, or the one that has to arrive before it."""
        chosen = self.flying[place]
        if not chosen.overtakes:
            chosen = next(each for each in self.flying if each[:2] == chosen[:2] and not each.overtakes)
        self.flying.remove(chosen)
        chosen.happen()

    # -- what the protocol promises ---------------------------------------------------------------

    def check_alive(self) -> None:
        """No value is gone while a fork of it is held or on its way."""
        wanted = [(fork.rref, fork.owner) for worker in self.workers for fork in worker.forks.values()]
        for rref, owner in wanted + self.carried:
            if rref in self.made:
                assert self.workers[owner].owned.get(rref) is self.made[rref]

    def check_empty(self, where: str = "") -> None:
        """Nothing is left: every value was freed, every wait has ended."""
        for rank in self.survivors():
            assert not self.workers[rank].owned, where
            assert not self.workers[rank].forks, where
        assert not [pair for pair, number in self.unanswered.items() if number and self.lost not in pair], where
        assert self.lost is not None or (self.unconfirmed, self.carried) == (0, []), where

    # -- what arrives -----------------------------------------------------------------------------

    def _create(self, fork: Fork, creator: int) -> None:
        self.workers[fork.owner].create(fork.rref, fork.id, creator)
        self._begin(fork.owner, fork.rref, Step(fork.owner, creator, partial(self._acknowledge, creator, fork)))
        self._carry_out(fork.owner)

    def _begin(self, owner: int, rref: GlobalId, acknowledge: Step | None) -> None:
        entry = self.workers[owner].create(rref, None, owner)
        assert self.made.setdefault(rref, entry) is entry or self.lost is not None
        self.running.append(Step(owner, owner, partial(self._finish, owner, entry, acknowledge)))

    def _finish(self, owner: int, entry: OwnedValue, acknowledge: Step | None) -> None:
        self.workers[owner].settle(entry, "result", None)
        if acknowledge is not None:
            self.flying.append(acknowledge)
        self._carry_out(owner)

    def _acknowledge(self, creator: int, fork: Fork) -> None:
        self.workers[creator].confirm(fork)
        self._carry_out(creator)

    def _receive(self, ticket: Ticket, source: int, to: int) -> None:
        worker = self.workers[to]
        held = worker.receive(ticket, source)
        self.carried.remove((ticket.rref, ticket.owner))
        self.held.append((to, held))
        if isinstance(held, OwnedValue):
            assert self.made.setdefault(ticket.rref, held) is held or self.lost is not None
        elif not worker.when_confirmed([held], partial(self._confirmed, held)):
            self.unconfirmed += 1
        self._carry_out(to)

    def _confirmed(self, fork: Fork) -> None:
        self.unconfirmed -= 1
        if self.lost is None:
            assert fork.id in self.workers[fork.owner].owned[fork.rref].holders

    def _fetch(self, fork: Fork, source: int) -> None:
        entry = self.workers[fork.owner].find(fork.rref)
        self.workers[fork.owner].when_settled(entry, partial(self._answered, source, fork.owner))
        self._carry_out(fork.owner)

    def _answered(self, source: int, owner: int) -> None:
        self.unanswered[source, owner] -= 1

    def _notify(self, rank: int, to: int, kind: int, value: tuple[object, ...]) -> None:
        self.flying.append(Step(rank, to, partial(self._hear, to, kind, rank, value), overtakes=False))

    def _hear(self, rank: int, kind: int, source: int, value: tuple[object, ...]) -> None:
        self.workers[rank].hear(kind, source, value)
        self._carry_out(rank)

    def _carry_out(self, rank: int) -> None:
        effects = self.workers[rank].take_effects()
        for to, kind, value in effects.notices:
            if to != self.lost:
                self._notify(rank, to, kind, value)
        for ready in effects.answers + effects.starts:
            ready()
