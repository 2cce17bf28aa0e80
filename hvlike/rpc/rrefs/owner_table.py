"""The values that this worker owns and others may ask for by name.

An entry stands in the table while a fork of it is known, a message of the owner to itself carries it, or its value is
still to come. RRef objects on the owner hold their entry themselves, so a value lives as long as the table or such an
object has it, and a local RRef that was never sent is not in the table at all.

Pure: takes events, returns what they are about, adds what follows to its effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvlike.errors import WorkerLostError
from hvlike.rpc.rrefs.effects import REGISTERED, Effects, Notice
from hvlike.rpc.rrefs.entry import Entry, Holder
from hvlike.rpc.rrefs.identity import GlobalId


class OwnerTable:
    """Owner's side of the lifetime protocol."""

    def __init__(self, rank: int, effects: Effects) -> None:
        self.effects = effects
        self.entries: dict[GlobalId, Entry] = {}
        gone = WorkerLostError("The value of this RRef is gone: the worker that has sent the RRef on has been lost.")
        self.no_creations: dict[int, Exception] = {rank: gone}
        """Workers whose creations cannot be still to come, and why: this one, and those that are lost."""

    def find(self, rref: GlobalId) -> Entry:
        """The entry of that name; one that waits for its creation where a message about it has overtaken that."""
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = Entry(rref)
            if rref.created_on in self.no_creations:
                self.settle(entry, None, self.no_creations[rref.created_on])
        return entry

    def create(self, rref: GlobalId) -> Entry:
        """A function is going to make its value."""
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = Entry(rref)
        entry.created = True
        return entry

    def settle(self, entry: Entry, value: Any, failure: Any) -> None:
        """The value is there, or will never be. Those who wait are ready. The second time does nothing."""
        if entry.settled:
            return
        entry.value, entry.failure = value, failure
        entry.created = entry.settled = True
        self.effects.answers.extend(entry.waiting)
        entry.waiting.clear()
        self._free_unneeded(entry)

    def when_settled(self, entry: Entry, then: Callable[[], None]) -> None:
        """Have `then` called when the value is there or will never be; now if that is so."""
        if entry.settled:
            self.effects.answers.append(then)
        else:
            entry.waiting.append(then)

    def share(self, entry: Entry, fork: GlobalId, rank: int) -> None:
        """A fork goes to another worker: known from now on."""
        if rank not in self.no_creations:
            self.entries[entry.id] = entry
            self._holder(entry, fork, rank).registered = True

    def unshare(self, entry: Entry, fork: GlobalId) -> None:
        """The message with that fork, or with that reservation, was not sent after all."""
        entry.holders.pop(fork, None)
        entry.reserved.discard(fork)
        self._free_unneeded(entry)

    def reserve(self, entry: Entry, reservation: GlobalId) -> None:
        """The owner sends the RRef to itself: no fork, but it has to be found when the message is opened."""
        self.entries[entry.id] = entry
        entry.reserved.add(reservation)

    def claim(self, rref: GlobalId, reservation: GlobalId) -> Entry:
        """The owner's message to itself has been opened."""
        entry = self.find(rref)
        entry.reserved.discard(reservation)
        self._free_unneeded(entry)
        return entry

    def register(self, rref: GlobalId, fork: GlobalId, rank: int) -> Entry:
        """A user has a fork."""
        entry = self.find(rref)
        holder = self._holder(entry, fork, rank)
        holder.registered = True
        self._end_holder(entry, fork)
        return entry

    def answer_registration(self, rref: GlobalId, fork: GlobalId, rank: int) -> None:
        """A user that got its fork from another user asks for it to be registered."""
        self.register(rref, fork, rank)
        self.effects.notices.append(Notice(rank, REGISTERED, (tuple(fork),)))

    def fetched(self, rref: GlobalId, fork: GlobalId, rank: int) -> Entry:
        """A user asks for the value through its fork."""
        entry = self.find(rref)
        self._holder(entry, fork, rank).fetches += 1
        self._end_holder(entry, fork)
        return entry

    def delete(self, rref: GlobalId, fork: GlobalId, rank: int, fetches: int) -> None:
        """A fork is gone after so many fetches."""
        entry = self.find(rref)
        self._holder(entry, fork, rank).deleted = fetches
        self._end_holder(entry, fork)

    def forget(self, rank: int, failure: Exception) -> None:
        """Worker `rank` is gone, its forks with it; creations that it has not sent fail with `failure`."""
        self.no_creations[rank] = failure
        for entry in list(self.entries.values()):
            for fork in [fork for fork, holder in entry.holders.items() if holder.rank == rank]:
                del entry.holders[fork]
            if not entry.created and entry.id.created_on == rank:
                self.settle(entry, None, failure)
            self._free_unneeded(entry)

    def _holder(self, entry: Entry, fork: GlobalId, rank: int) -> Holder:
        holder = entry.holders.get(fork)
        if holder is None:
            holder = entry.holders[fork] = Holder(rank)
        return holder

    def _end_holder(self, entry: Entry, fork: GlobalId) -> None:
        if entry.holders[fork].is_over:
            del entry.holders[fork]
            self._free_unneeded(entry)

    def _free_unneeded(self, entry: Entry) -> None:
        if not entry.is_needed and self.entries.pop(entry.id, None) is not None:
            self.effects.freed.append(entry)
