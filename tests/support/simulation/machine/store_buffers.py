"""What a rank has written to shared memory, and others do not see yet: the store buffers of processors.

    no buffer     all see a store at once, as if all ranks shared one core
    in order      x86: stores become visible later, in their order; a lock or a semaphore is a fence
    reordered     ARM: stores to different words become visible in any order, unless a fence is between them

A rank sees its own stores at once. Only words are delayed, not the bytes of tensors; and a load is never early.

Source: Sewell et al., x86-TSO, CACM 53(7), 2010; Arm Architecture Reference Manual, B2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from support.simulation.machine.scheduler import Scheduler

Order = Literal["at once", "in order", "reordered"]

LONGEST_SECONDS = 100e-6  # Until a store is visible, with or without a fence
CHANCES = 0.02, 0.15, 0.15  # That one becomes visible when somebody looks at a word, or writes one: drawn for a job
HURRY = 0.2  # How often another rank goes on just after a store: what it sees then is what differs from "at once"


@dataclass
class Store:
    """One word that was written."""

    when: float
    address: int
    view: memoryview
    place: int
    value: int
    is_awaited: bool


class StoreBuffers:
    """Those of all ranks of a job."""

    def __init__(self, scheduler: Scheduler, order: Order) -> None:
        self._scheduler, self._order = scheduler, order
        self._waiting: dict[int, list[Store]] = {}  # By rank
        self._chance = scheduler.random.choice(CHANCES)
        scheduler.fence = self.fence

    def store(self, view: memoryview, place: int, address: int, value: int, *, is_awaited: bool = True) -> None:
        """Write a word that lies at this address. is_awaited: whether others may wait for it."""
        if self._order == "at once" or self._scheduler.current is None:
            view[place] = value
            if is_awaited:
                self._scheduler.change()
        else:
            scheduler = self._scheduler
            store = Store(scheduler.now, address, view, place, value, is_awaited)
            self._waiting.setdefault(scheduler.rank, []).append(store)
            self._drain()
            if scheduler.random.random() < HURRY:
                scheduler.hurry()

    def look(self, view: memoryview, place: int, address: int) -> int:
        """Read a word that lies at this address."""
        if self._waiting:
            self._drain()
            for store in reversed(self._waiting.get(self._scheduler.rank, ())):
                if store.address == address:
                    return store.value
        value: int = view[place]
        return value

    def fence(self) -> None:
        """All that this rank has written is visible before it goes on."""
        if not self._waiting or self._scheduler.current is None:
            return
        for store in self._waiting.pop(self._scheduler.rank, ()):
            store.view[store.place] = store.value
            if store.is_awaited:
                self._scheduler.change()

    def _drain(self) -> None:
        """Some time has passed."""
        random, now = self._scheduler.random.random, self._scheduler.now
        for rank in tuple(self._waiting):
            waiting = self._waiting[rank]
            while waiting and (now - waiting[0].when > LONGEST_SECONDS or random() < self._chance):
                place = int(random() * len(waiting)) if self._order == "reordered" else 0
                # Stores to one word keep their order.
                address = waiting[place].address
                store = waiting.pop(next(each for each, store in enumerate(waiting) if store.address == address))
                store.view[store.place] = store.value
                self._scheduler.changes += store.is_awaited  # Not as a change of who looks
            if not waiting:
                del self._waiting[rank]
