"""A value on its owner, and the forks of it that the owner knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvlike.rpc.devices.devices import Marks
from hvlike.rpc.rrefs.identity import GlobalId


class Holder:
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


class Entry:
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
        self.marks: Marks | None = None
        """Where in the streams of this worker's GPUs the value is there."""
        self.failure: Any = None
        """remote_error.describe's account of the exception, or an exception to raise as it is."""
        self.holders: dict[GlobalId, Holder] = {}
        self.reserved: set[GlobalId] = set()
        """Messages of the owner to itself that carry this RRef."""
        self.waiting: list[Callable[[], None]] = []
        """To be called when it is settled, in the thread that settles it."""

    @property
    def is_needed(self) -> bool:
        """True while somebody may ask for it by its name."""
        return not self.settled or bool(self.holders) or bool(self.reserved)
