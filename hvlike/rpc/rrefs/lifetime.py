"""The lifetime protocol of RRefs on one worker, pure: events in, messages out.

(G1) The owner hears of the end of every fork, sent only once the fork was confirmed. (G2) A fork that vouches for a
child is not deleted before the owner knows of the child. Messages may overtake each other; each arrives once.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from hvlike.rpc.rrefs.effects import ACCEPTED, DELETE, DROPPED, REGISTER, REGISTERED, Effects, Notice
from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.fork_table import ForkTable
from hvlike.rpc.rrefs.identity import GlobalId, Ticket
from hvlike.rpc.rrefs.owner_table import OwnerTable


class Lifetime:
    """What one worker knows of the RRefs of a session, as owner and as user."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._effects = Effects()
        self.owned = OwnerTable(rank, self._effects)
        self.used = ForkTable(self._effects)
        self._numbers = count()

    def new_id(self) -> GlobalId:
        """A name of this worker for an RRef or a fork. Safe from any thread."""
        return GlobalId(self.rank, next(self._numbers))

    def take_effects(self) -> Effects:
        """What has followed from the events since the last time."""
        effects = self._effects
        self._effects = self.owned.effects = self.used.effects = Effects()
        return effects

    def create(self, rref: GlobalId, fork: GlobalId | None, rank: int) -> Entry:
        """Worker `rank` has this worker make a value. fork: its fork; None on the owner itself."""
        entry = self.owned.create(rref)
        if fork is not None:
            self.owned.register(rref, fork, rank)
        return entry

    def send(self, held: Entry | Fork, destination: int) -> Ticket:
        """An RRef goes into a message; what is to be kept until it has arrived is kept from now on."""
        child = self.new_id()
        if isinstance(held, Fork):
            self.used.lend(held, child, destination)
            return Ticket(held.rref, held.owner, child, held.id)
        if destination == self.rank:
            self.owned.reserve(held, child)
        else:
            self.owned.share(held, child, destination)
        return Ticket(held.id, self.rank, child, None)

    def unsend(self, held: Entry | Fork, ticket: Ticket) -> None:
        """The message was not built to its end."""
        if isinstance(held, Fork):
            self.used.accepted(held.id, ticket.child)
        else:
            self.owned.unshare(held, ticket.child)

    def receive(self, ticket: Ticket, source: int) -> Entry | Fork:
        """A message with an RRef is being opened: its entry on its owner, a new fork elsewhere."""
        if ticket.owner != self.rank:
            return self.used.receive(ticket, source)
        if ticket.parent is None:
            return self.owned.claim(ticket.rref, ticket.child)
        entry = self.owned.find(ticket.rref)
        self._effects.notices.append(Notice(source, ACCEPTED, (tuple(ticket.parent), tuple(ticket.child))))
        return entry

    def hear(self, kind: int, source: int, value: tuple[Any, ...]) -> None:
        """A notice has come from worker `source`."""
        if kind == REGISTER:
            self.owned.answer_registration(GlobalId(*value[0]), GlobalId(*value[1]), source)
        elif kind == REGISTERED:
            self.used.registered(GlobalId(*value[0]))
        elif kind == ACCEPTED:
            self.used.accepted(GlobalId(*value[0]), GlobalId(*value[1]))
        elif kind == DELETE:
            self.owned.delete(GlobalId(*value[0]), GlobalId(*value[1]), source, value[2])
        elif kind == DROPPED:
            fork = self.used.forks.get(GlobalId(*value[0]))
            if fork is not None:
                self.used.drop(fork)

    def drop_all(self) -> None:
        """Shutdown takes every fork away, held or not."""
        for fork in list(self.used.forks.values()):
            self.used.drop(fork)

    def forget(self, rank: int, failure: Exception) -> None:
        """Worker `rank` is gone: what it held is given up, what it was to create fails with `failure`."""
        self.used.forget(rank)
        self.owned.forget(rank, failure)
