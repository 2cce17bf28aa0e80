"""The lifetime protocol of RRefs on one worker, pure: events in, messages out.

(G1) The owner hears of the end of every fork, sent only after the fork was confirmed. (G2) A fork that vouches for a
child is not deleted before the owner knows of the child. Notices and fetches of one worker arrive in order; calls, and
what is in them, may overtake them and be overtaken.

An owned value stays in the owner's table while a fork of it is known, while a message of the owner to itself carries
it, or until it is computed. RRef objects on the owner hold the value themselves: it lives as long as the table or such
an object has it, and a local RRef that was never sent is not in the table at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hvlike.errors import WorkerLostError
from hvlike.rpc.wire.devices import NO_EVENTS, ReadyEvents

_GONE = "The value of this RRef is gone: the worker that has sent the RRef on has been lost."


class GlobalId(NamedTuple):
    """Name of an RRef or a fork, unique in a session. It travels as a plain tuple, which is equal to it."""

    created_on: int  # Rank of the worker that made the name
    local_id: int  # Counter of that worker

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class Ticket(NamedTuple):
    """An RRef while it travels: the child fork that the receiver is to have, and who vouches for it meanwhile.

    Hand-over | parent             | the receiver
    ----------+--------------------+-------------------------------------------------------------------------------
    owner to  | none               | has the child, which the owner knows since it packed the message
    user      |                    |
    user to   | the sender's fork  | takes the value from its table and tells the sender
    owner     |                    |
    user to   | the sender's fork  | asks the owner to register the child; on the reply the child is confirmed, and it
    user      |                    | tells the sender
    owner to  | none               | takes the value from its table, and the child is over
    itself    |                    |

    A parent that vouches for a child is not deleted before the sender has been told.
    """

    rref: GlobalId
    owner: int
    child: GlobalId
    parent: GlobalId | None

    def pack(self) -> tuple[int, ...]:
        return (*self.rref, self.owner, *self.child, *(self.parent or ()))

    @classmethod
    def unpack(cls, numbers: tuple[int, ...]) -> Ticket:
        parent = GlobalId(*numbers[5:]) if len(numbers) > 5 else None
        return cls(GlobalId(*numbers[:2]), numbers[2], GlobalId(*numbers[3:5]), parent)


REGISTER, REGISTERED, ACCEPTED, DELETE, DROPPED, CREATION_QUERY, CREATED = NOTICES = range(30, 37)
"""Kinds of notices.

REGISTER        user -> owner       this worker has the fork now                               (RRef, fork)
REGISTERED      owner -> user       the owner knows the fork                                   (fork,)
ACCEPTED        receiver -> sender  the parent need not vouch for the child any more           (parent, child)
DELETE          user -> owner       the fork is gone                                           (RRef, fork)
DROPPED         user -> itself      from the finalizer of the RRef object                      (fork,)
CREATION_QUERY  owner -> creator    a worker is lost, and the value is not there: will it be?  (RRef,)
CREATED         creator -> owner    it was there: nobody vouched for it any more               (RRef,)
"""


Notice = tuple[int, int, tuple[Any, ...]]  # A message without a reply, for Agent.notify: rank, kind, value


@dataclass
class Effects:
    """What follows from an event of the protocol: collected under the lock, carried out without it."""

    notices: list[Notice] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)  # What waited for a value: quick, holds no lock
    starts: list[Callable[[], None]] = field(default_factory=list)  # Functions of callers whose arguments are confirmed
    freed: list[Any] = field(default_factory=list)  # OwnedValues: users' finalizers run where these are dropped


@dataclass(eq=False, slots=True)
class OwnedValue:
    """What an owner keeps of an RRef. Only the Lifetime changes it.

    settled  failure   value
    no       -         not computed yet, or the message that creates it has not come yet
    yes      None      computed
    yes      else      never: the function raised
    """

    id: GlobalId
    what: str = ""  # The function that makes the value; empty for RRef(value)
    created: bool = False  # False while the owner has only heard of it from others
    settled: bool = False
    value: Any = None
    events: ReadyEvents = NO_EVENTS  # When the value is ready in the streams of this worker's GPUs
    failure: Any = None  # The Description of the exception, or an exception to raise as it is
    holders: dict[GlobalId, int] = field(default_factory=dict)  # The forks, and the rank that has each
    deleted: set[GlobalId] = field(default_factory=set)  # Forks whose creation, which they have overtaken, is to come
    waiting: list[Callable[[], None]] = field(default_factory=list)  # Called by the thread that settles it

    @property
    def is_needed(self) -> bool:
        """True while somebody may ask for it by its name."""
        return not self.settled or bool(self.holders or self.deleted)


@dataclass(eq=False, slots=True)
class ConfirmationWait:
    """Work that starts when a number of forks are confirmed."""

    missing: int
    then: Callable[[], None]


@dataclass(eq=False, slots=True)
class Fork:
    """The state of a user's RRef, without the object that the user holds.

    pending -> confirmed by the owner -> dropped, children all accepted -> deleted
    A drop may come first: the owner is told only after the confirmation.
    """

    rref: GlobalId
    id: GlobalId
    owner: int  # Rank
    confirmed: bool = False
    dropped: bool = False  # True when no RRef object holds it any more, or shutdown has taken it away
    deleted: bool = False  # True when the owner has been told
    children: dict[GlobalId, int] = field(default_factory=dict)  # Sent on, maybe unknown to the owner, and where to
    sender: int | None = None  # Rank that sent it, if that is a user: to be told when the owner knows this fork
    parent: GlobalId | None = None  # The sender's fork
    waiting: list[ConfirmationWait] = field(default_factory=list)  # What starts when it is confirmed

    @property
    def is_creation(self) -> bool:
        """True while the call that creates the value has not ended."""
        return self.sender is None and not self.confirmed

    def __str__(self) -> str:
        return f"UserRRef(rref_id={self.rref}, fork_id={self.id})"


class Lifetime:
    """What one worker knows of the RRefs of a session, as owner and as user. Takes events, adds to its effects."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.owned: dict[GlobalId, OwnedValue] = {}  # By the names of the RRefs
        self.forks: dict[GlobalId, Fork] = {}  # Of values of other workers, by their own names
        self.lost: set[int] = set()
        self.no_creations: dict[int, Exception] = {rank: WorkerLostError(_GONE)}
        """Workers from which no creation can come any more, and why: this one, and those that are lost."""
        self._over: Exception | None = None  # After the session: why values that are asked for will never be there
        self._effects = Effects()
        self._numbers = count()

    def new_id(self) -> GlobalId:
        return GlobalId(self.rank, next(self._numbers))

    def take_effects(self) -> Effects:
        effects, self._effects = self._effects, Effects()
        return effects

    def send(self, held: OwnedValue | Fork, destination: int) -> Ticket:
        """An RRef goes into a message; what is to be kept until it has arrived is kept from now on."""
        child = self.new_id()
        if isinstance(held, OwnedValue):
            self._share(held, child, destination)
            return Ticket(held.id, self.rank, child, None)
        if destination not in self.lost:
            held.children[child] = destination
        return Ticket(held.rref, held.owner, child, held.id)

    def unsend(self, held: OwnedValue | Fork, ticket: Ticket) -> None:
        """The message was not sent after all."""
        if isinstance(held, OwnedValue):
            self._unshare(held, ticket.child)
        else:
            self._accept(held, ticket.child)

    def receive(self, ticket: Ticket, source: int) -> OwnedValue | Fork:
        """A message with an RRef is opened: its entry on its owner, a new fork elsewhere."""
        if ticket.owner != self.rank:
            return self._receive_fork(ticket, source)
        entry = self.find(ticket.rref)
        if ticket.parent is None:
            self._unshare(entry, ticket.child)
        else:
            self._tell(source, ACCEPTED, ticket.parent, ticket.child)
        return entry

    def hear(self, kind: int, source: int, names: tuple[tuple[int, int], ...]) -> None:
        """A notice has come from worker `source`."""
        first, *more = (GlobalId(*name) for name in names)
        fork = self.forks.get(first)
        if kind == REGISTER:
            self._share(self.find(first), more[0], source)
            self._tell(source, REGISTERED, more[0])
        elif kind == DELETE:
            self._delete(first, more[0])
        elif kind == CREATION_QUERY:
            self._answer_query(first, source)
        elif kind == CREATED:
            self._give_up(first)
        elif fork is not None and kind == ACCEPTED:
            self._accept(fork, more[0])
        elif fork is not None and kind == REGISTERED:
            self.confirm(fork)
        elif fork is not None and kind == DROPPED:
            self.drop(fork)

    def forget(self, rank: int, failure: Exception) -> None:
        """Worker `rank` is gone: what it held is given up, what it was to create fails with `failure`, and nothing that
        it still had to tell will come.
        """
        self.lost.add(rank)
        self.no_creations[rank] = failure
        self.no_creations[self.rank] = WorkerLostError(f"{_GONE} {failure}", [rank])
        for fork in list(self.forks.values()):
            for child in [child for child, to in fork.children.items() if to == rank]:
                self._accept(fork, child)
            if fork.owner == rank:
                self.confirm(fork)
        for entry in list(self.owned.values()):
            for held in [held for held, holder in entry.holders.items() if holder == rank]:
                del entry.holders[held]
            if entry.id.created_on == rank:
                entry.deleted.clear()
            if not entry.created:
                self._expect_creation(entry)
            self._free_unneeded(entry)

    def end(self, failure: Exception) -> None:
        """The session is over, though threads may use its RRefs: what is not computed fails, now or when heard of."""
        self._over = failure
        for entry in list(self.owned.values()):
            self.settle(entry, None, failure)
        self.owned.clear()
        self.forks.clear()

    def _tell(self, rank: int, kind: int, *names: GlobalId) -> None:
        self._effects.notices.append((rank, kind, tuple(map(tuple, names))))

    # -- as owner -----------------------------------------------------------------------------

    def create(self, rref: GlobalId, fork: GlobalId | None, rank: int) -> OwnedValue:
        """Worker `rank` has this worker make a value. fork: its fork; None on the owner itself."""
        entry = self.owned.setdefault(rref, OwnedValue(rref))
        entry.created = True
        if fork is not None:
            self._share(entry, fork, rank)
        if self._over is not None:
            self.settle(entry, None, self._over)
        self._free_unneeded(entry)
        return entry

    def find(self, rref: GlobalId) -> OwnedValue:
        """Return the entry of a name; a new one if this message has overtaken the creation."""
        entry = self.owned.get(rref)
        if entry is None:
            entry = self.owned[rref] = OwnedValue(rref)
            if self._over is not None:
                self.settle(entry, None, self._over)
            else:
                self._expect_creation(entry)
        return entry

    def _expect_creation(self, entry: OwnedValue) -> None:
        """The creation is on its way, or never comes: where a worker is lost, who sent the RRef on may not have vouched
        for it until its message was here, and the value may have been freed.
        """
        failure = self.no_creations.get(entry.id.created_on)
        if failure is not None:
            self.settle(entry, None, failure)
        elif self.lost:
            self._tell(entry.id.created_on, CREATION_QUERY, entry.id)

    def _give_up(self, rref: GlobalId) -> None:
        """The value was created, and is not there: who asks for it gets an error."""
        entry = self.owned.get(rref)
        # A creation that the deletion of its fork has overtaken is still to come.
        if entry is not None and not entry.created and not entry.deleted:
            self.settle(entry, None, self.no_creations[self.rank])

    def settle(self, entry: OwnedValue, value: Any, failure: Any) -> None:
        """The value is computed, or will never be. A second call does nothing."""
        if entry.settled:
            return
        entry.value, entry.failure = value, failure
        entry.settled = True
        self._effects.answers.extend(entry.waiting)
        entry.waiting.clear()
        self._free_unneeded(entry)

    def when_settled(self, entry: OwnedValue, then: Callable[[], None]) -> None:
        """Call `then` when the entry is settled; now if it is."""
        if entry.settled:
            self._effects.answers.append(then)
        else:
            entry.waiting.append(then)

    def _share(self, entry: OwnedValue, fork: GlobalId, rank: int) -> None:
        """Worker `rank` has a fork, or is sent one: known from now on."""
        if fork in entry.deleted:
            entry.deleted.remove(fork)
        elif rank not in self.lost:
            heard = self.owned.get(entry.id, entry)
            if heard is not entry:
                # An RRef object here has held the value while others have told of it again.
                entry.holders.update(heard.holders)
                heard.events = entry.events
                self.settle(heard, entry.value, entry.failure)
            self.owned[entry.id] = entry
            entry.holders[fork] = rank

    def _unshare(self, entry: OwnedValue, fork: GlobalId) -> None:
        entry.holders.pop(fork, None)
        self._free_unneeded(entry)

    def _delete(self, rref: GlobalId, fork: GlobalId) -> None:
        """Nobody has this fork any more."""
        entry = self.find(rref)
        if fork not in entry.holders and not entry.created:
            entry.deleted.add(fork)
        self._unshare(entry, fork)

    def _free_unneeded(self, entry: OwnedValue) -> None:
        if not entry.is_needed and self.owned.get(entry.id) is entry:
            del self.owned[entry.id]
            self._effects.freed.append(entry)

    # -- as user ------------------------------------------------------------------------------

    def begin(self, fork: Fork) -> None:
        """This worker has asked the owner to create the value; confirmed by the end of that call."""
        self.forks[fork.id] = fork

    def confirm(self, fork: Fork) -> None:
        """The owner knows of it. A second call does nothing."""
        if fork.confirmed:
            return
        fork.confirmed = True
        if fork.sender is not None and fork.parent is not None:
            self._tell(fork.sender, ACCEPTED, fork.parent, fork.id)
        for wait in fork.waiting:
            wait.missing -= 1
            if not wait.missing:
                self._effects.starts.append(wait.then)
        fork.waiting.clear()
        self._delete_finished(fork)

    def when_confirmed(self, forks: Sequence[Fork], then: Callable[[], None]) -> bool:
        """True if all are confirmed; else `then` may start when they are."""
        missing = [fork for fork in forks if not fork.confirmed]
        wait = ConfirmationWait(len(missing), then)
        for fork in missing:
            fork.waiting.append(wait)
        return not missing

    def _answer_query(self, rref: GlobalId, owner: int) -> None:
        """Tell the owner of a value that this worker has had it created, unless that is still on its way."""
        if not any(fork.rref == rref and fork.is_creation for fork in self.forks.values()):
            self._tell(owner, CREATED, rref)

    def drop(self, fork: Fork) -> None:
        """Nobody holds it any more. A second call does nothing."""
        fork.dropped = True
        self._delete_finished(fork)

    def drop_all(self) -> None:
        """Shutdown takes every fork away, held or not."""
        for fork in list(self.forks.values()):
            self.drop(fork)

    def _receive_fork(self, ticket: Ticket, source: int) -> Fork:
        """A fork has come: from its owner, who knows of it, or from a user, who does not tell the owner."""
        fork = self.forks[ticket.child] = Fork(ticket.rref, ticket.child, ticket.owner)
        if ticket.parent is None:
            fork.confirmed = True
        else:
            fork.sender, fork.parent = source, ticket.parent
            if fork.owner in self.lost:
                self.confirm(fork)
            else:
                self._tell(fork.owner, REGISTER, fork.rref, fork.id)
        return fork

    def _accept(self, fork: Fork, child: GlobalId) -> None:
        """The owner knows of the child, or the message with it was not sent."""
        if fork.children.pop(child, None) is not None:
            self._delete_finished(fork)

    def _delete_finished(self, fork: Fork) -> None:
        if fork.dropped and fork.confirmed and not fork.children and not fork.deleted and self._over is None:
            fork.deleted = True
            del self.forks[fork.id]
            self._tell(fork.owner, DELETE, fork.rref, fork.id)
