"""A fork: this worker's share in a value that another worker owns."""

from __future__ import annotations

from collections.abc import Callable

from hvlike.rpc.rrefs.identity import GlobalId


class Gathering:
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
        self.waiting: list[Gathering] = []
        """What starts when it is confirmed."""

    def __str__(self) -> str:
        return f"UserRRef(rref_id={self.rref}, fork_id={self.id})"
