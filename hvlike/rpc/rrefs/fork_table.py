"""The forks that this worker has of values of others.

Pure: takes events, returns what they are about, adds what follows to its effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvlike.rpc.rrefs.effects import ACCEPTED, DELETE, REGISTER, Effects, Notice
from hvlike.rpc.rrefs.fork import Fork, Gathering
from hvlike.rpc.rrefs.identity import GlobalId, Ticket


class ForkTable:
    """User's side of the lifetime protocol."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.forks: dict[GlobalId, Fork] = {}
        self.lost: set[int] = set()

    def begin(self, fork: Fork) -> None:
        """This worker has asked the owner to create the value; confirmed by the end of that call."""
        self.forks[fork.id] = fork

    def receive(self, ticket: Ticket, source: int) -> Fork:
        """A fork has come: from its owner, who knows of it, or from a user, who does not tell the owner."""
        fork = self.forks[ticket.child] = Fork(ticket.rref, ticket.child, ticket.owner)
        if ticket.parent is None:
            fork.confirmed = True
        else:
            fork.sender, fork.parent = source, ticket.parent
            if fork.owner in self.lost:
                self.confirm(fork)
            else:
                self._tell(fork.owner, REGISTER, (tuple(fork.rref), tuple(fork.id)))
        return fork

    def confirm(self, fork: Fork) -> None:
        """The owner knows of it. The second time does nothing."""
        if fork.confirmed:
            return
        fork.confirmed = True
        if fork.sender is not None and fork.parent is not None:
            self._tell(fork.sender, ACCEPTED, (tuple(fork.parent), tuple(fork.id)))
        for gathering in fork.waiting:
            gathering.missing -= 1
            if not gathering.missing:
                self.effects.starts.append(gathering.then)
        fork.waiting.clear()
        self._delete_finished(fork)

    def registered(self, fork: GlobalId) -> None:
        """The owner has answered a registration."""
        if fork in self.forks:
            self.confirm(self.forks[fork])

    def when_confirmed(self, forks: Sequence[Fork], then: Callable[[], None]) -> bool:
        """True if all are confirmed; else `then` may start when they are."""
        missing = [fork for fork in forks if not fork.confirmed]
        gathering = Gathering(len(missing), then)
        for fork in missing:
            fork.waiting.append(gathering)
        return not missing

    def fetch(self, fork: Fork) -> None:
        """The value is about to be asked for through it."""
        fork.fetches += 1

    def lend(self, fork: Fork, child: GlobalId, rank: int) -> None:
        """A child goes to worker `rank`: the fork stays until that worker has told us that the owner knows."""
        if rank not in self.lost:
            fork.children[child] = rank

    def accepted(self, parent: GlobalId, child: GlobalId) -> None:
        """The owner knows of the child, or the message with it was not sent after all."""
        fork = self.forks.get(parent)
        if fork is not None and fork.children.pop(child, None) is not None:
            self._delete_finished(fork)

    def drop(self, fork: Fork) -> None:
        """Nobody holds it any more. The second time does nothing."""
        fork.dropped = True
        self._delete_finished(fork)

    def forget(self, rank: int) -> None:
        """Worker `rank` is gone: nothing that it still had to tell will come."""
        self.lost.add(rank)
        for fork in list(self.forks.values()):
            for child in [child for child, to in fork.children.items() if to == rank]:
                self.accepted(fork.id, child)
            if fork.owner == rank:
                self.confirm(fork)

    def _delete_finished(self, fork: Fork) -> None:
        if fork.dropped and fork.confirmed and not fork.children and not fork.deleted:
            fork.deleted = True
            del self.forks[fork.id]
            self._tell(fork.owner, DELETE, (tuple(fork.rref), tuple(fork.id), fork.fetches))

    def _tell(self, rank: int, kind: int, value: tuple[object, ...]) -> None:
        self.effects.notices.append(Notice(rank, kind, value))
