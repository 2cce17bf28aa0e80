"""The records of the RRef lifetime protocol: names, messages, the owner's values and the users' forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvlike.rpc.wire.devices import ReadyEvents


class GlobalId(NamedTuple):
    """Rank and counter of the worker that gave the name. Travels as a plain tuple, which is equal to it."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class Ticket(NamedTuple):
    """What an RRef is while it travels: the child that the receiver is to have, and who vouches for it meanwhile.

    Hand-over | parent             | the receiver
    ----------+--------------------+---------------------------------------------------------------------------------
    owner to  | none               | has the child, which the owner knows since the message was built
    user      |                    |
    user to   | the sender's fork  | takes the value out of its table, tells the sender
    owner     |                    |
    user to   | the sender's fork  | has the owner register the child; on its answer the child is confirmed and the
    user      |                    | sender told
    owner to  | none               | takes the value out of its table: the child was a reservation, not a fork
    itself    |                    |

    A parent that vouches for a child is kept from being deleted until the sender has been told.
    """

    rref: GlobalId
    owner: int
    child: GlobalId
    parent: GlobalId | None

    def pack(self) -> tuple[int, ...]:
        """The numbers that travel."""
        return (*self.rref, self.owner, *self.child, *(self.parent or ()))

    @classmethod
    def unpack(cls, numbers: tuple[int, ...]) -> Ticket:
        """The ticket of these numbers."""
        parent = GlobalId(*numbers[5:]) if len(numbers) > 5 else None
        return cls(GlobalId(*numbers[:2]), numbers[2], GlobalId(*numbers[3:5]), parent)


REGISTER, REGISTERED, ACCEPTED, DELETE, DROPPED = 30, 31, 32, 33, 34
"""Kinds of notices.

REGISTER    user -> owner      this worker has the fork now        (RRef, fork)
REGISTERED  owner -> user      the owner knows it                  (fork,)
ACCEPTED    receiver -> sender the parent need not vouch any more  (parent, child)
DELETE      user -> owner      the fork is gone; so many fetches were made through it  (RRef, fork, fetches)
DROPPED     user -> itself     from the finaliser                  (fork,)
"""


class Notice(NamedTuple):
    """A message without an answer, for Agent.notify."""

    rank: int
    kind: int
    value: tuple[Any, ...]


@dataclass
class Effects:
    """Messages to send, work that may start, and values nobody refers to any more."""

    notices: list[Notice] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    """What waited for a value: quick, holds no lock."""
    starts: list[Callable[[], None]] = field(default_factory=list)
    """What waited for the confirmation of its arguments: functions of callers."""
    freed: list[Any] = field(default_factory=list)
    """Entries: their values may have finalisers of the user's, which run where the last reference is let go."""


class KnownFork:
    """One fork as the owner knows it.

    Messages overtake each other, so its registration, the fetches made through it and its deletion may come in any
    order. It is over when it has been registered, and deleted, and every fetch that the deletion counts has come.
    """

    __slots__ = ("deleted", "fetches", "rank", "registered")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        """The worker that has the fork."""
        self.registered = False
        self.fetches = 0
        """Fetches through it that have come."""
        self.deleted: int | None = None
        """Fetches that were made through it, once its end is known."""

    @property
    def is_over(self) -> bool:
        return self.registered and self.deleted == self.fetches


class OwnedValue:
    """What an owner keeps of an RRef. Changed only by the owner table, read by anybody.

    settled  failure   value
    no       -         still computed, or the message that creates it has not come yet
    yes      None      there
    yes      else      never: the function raised
    """

    __slots__ = (
        "created",
        "creator",
        "failure",
        "holders",
        "id",
        "marks",
        "reserved",
        "settled",
        "value",
        "waiting",
        "what",
    )

    def __init__(self, rref: GlobalId, what: str = "") -> None:
        self.id = rref
        self.what = what
        """The function that makes the value; empty where RRef(value) was given it."""
        self.created = False
        """False while the owner has only heard of it from others."""
        self.settled = False
        self.value: Any = None
        self.marks: ReadyEvents | None = None
        """Where in the streams of this worker's GPUs the value is there."""
        self.failure: Any = None
        """remote_error.describe's account of the exception, or an exception to raise as it is."""
        self.holders: dict[GlobalId, KnownFork] = {}
        self.reserved: set[GlobalId] = set()
        """Messages of the owner to itself that carry this RRef."""
        self.waiting: list[Callable[[], None]] = []
        """To be called when it is settled, in the thread that settles it."""

    @property
    def is_needed(self) -> bool:
        """True while somebody may ask for it by its name."""
        return not self.settled or bool(self.holders) or bool(self.reserved)


class ConfirmationWait:
    """Work that starts when a number of forks are confirmed."""

    __slots__ = ("missing", "then")

    def __init__(self, missing: int, then: Callable[[], None]) -> None:
        self.missing = missing
        self.then = then


class Fork:
    """The state of a user's RRef, without the object that the user holds.

    pending -> confirmed by the owner -> dropped, children all accepted -> deleted
    A drop may come first: the owner is told only after the confirmation.
    """

    __slots__ = (
        "children",
        "confirmed",
        "deleted",
        "dropped",
        "failure",
        "fetches",
        "id",
        "owner",
        "parent",
        "rref",
        "sender",
        "waiting",
    )

    def __init__(self, rref: GlobalId, fork: GlobalId, owner: int) -> None:
        self.rref = rref
        self.id = fork
        self.owner = owner
        """Rank."""
        self.confirmed = False
        self.dropped = False
        """True when nobody holds it any more, or shutdown has taken it away."""
        self.deleted = False
        """True when the owner has been told so."""
        self.failure: Exception | None = None
        """Why the creation was not acknowledged; raised wherever the RRef is used."""
        self.fetches = 0
        """How often the value was asked for through it."""
        self.children: dict[GlobalId, int] = {}
        """Forks sent on that the owner may not know yet, with the rank they were sent to."""
        self.sender: int | None = None
        self.parent: GlobalId | None = None
        """Who sent it and with which fork, until he has been told that he need not vouch for it any more."""
        self.waiting: list[ConfirmationWait] = []
        """What starts when it is confirmed."""

    def __str__(self) -> str:
        return f"UserRRef(rref_id={self.rref}, fork_id={self.id})"
