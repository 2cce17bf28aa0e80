"""The records of the RRef lifetime protocol: names, notices, the owner's values and the users' forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvlike.rpc.wire.devices import ReadyEvents


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
    owner to  | none               | takes the value from its table: the child was a reservation, not a fork
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


REGISTER, REGISTERED, ACCEPTED, DELETE, DROPPED = 30, 31, 32, 33, 34
"""Kinds of notices.

REGISTER    user -> owner       this worker has the fork now                               (RRef, fork)
REGISTERED  owner -> user       the owner knows the fork                                   (fork,)
ACCEPTED    receiver -> sender  the parent need not vouch for the child any more           (parent, child)
DELETE      user -> owner       the fork is gone; so many fetches were made through it     (RRef, fork, fetches)
DROPPED     user -> itself      from the finalizer of the RRef object                      (fork,)
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
class KnownFork:
    """A fork as the owner knows it.

    Messages overtake each other: its registration, the fetches made through it and its deletion come in any order. It
    is over when it was registered and deleted, and every fetch that the deletion counts has come.
    """

    rank: int  # The worker that has the fork
    registered: bool = False
    fetches: int = 0  # How many fetches through it have come
    deleted: int | None = None  # How many fetches were made through it, once it was deleted

    @property
    def is_over(self) -> bool:
        return self.registered and self.deleted == self.fetches


@dataclass(eq=False, slots=True)
class OwnedValue:
    """What an owner keeps of an RRef. Only the OwnerTable changes it.

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
    events: ReadyEvents | None = None  # When the value is ready in the streams of this worker's GPUs
    failure: Any = None  # The Description of the exception, or an exception to raise as it is
    holders: dict[GlobalId, KnownFork] = field(default_factory=dict)
    reserved: set[GlobalId] = field(default_factory=set)  # Messages of the owner to itself that carry this RRef
    waiting: list[Callable[[], None]] = field(default_factory=list)  # Called by the thread that settles it

    @property
    def is_needed(self) -> bool:
        """True while somebody may ask for it by its name."""
        return not self.settled or bool(self.holders) or bool(self.reserved)


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
    fetches: int = 0  # How often the value was asked for through it
    children: dict[GlobalId, int] = field(default_factory=dict)  # Sent on, maybe unknown to the owner, and where to
    sender: int | None = None  # Rank that sent it, if that is a user: to be told when the owner knows this fork
    parent: GlobalId | None = None  # The sender's fork
    waiting: list[ConfirmationWait] = field(default_factory=list)  # What starts when it is confirmed

    def __str__(self) -> str:
        return f"UserRRef(rref_id={self.rref}, fork_id={self.id})"
