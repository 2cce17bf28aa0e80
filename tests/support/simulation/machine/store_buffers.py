"""What a rank has written to shared memory, and others do not see yet: the store buffers of processors.

    no buffer     all see a store at once, as if all ranks shared one core
    in order      x86: stores become visible later, in their order; a lock or a semaphore is a fence
    reordered     ARM: stores to different words become visible in any order, and a load may come before others that
                  stand before it, so that it finds what the word held until just now; unless a fence is between them

A rank sees its own stores at once, and never an older value of a word than before. Only words are delayed, not the
bytes of tensors.

Source: Sewell et al., x86-TSO, CACM 53(7), 2010; Arm Architecture Reference Manual, B2.3.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from support.simulation.machine.scheduler import Scheduler

Order = Literal["at once", "in order", "reordered"]

LONGEST_SECONDS = 100e-6  # Until a store is visible, with or without a fence; and by which a load is early
CHANCES = 0.02, 0.15, 0.15  # That one becomes visible when somebody looks at a word, or writes one: drawn for a job
EARLY = 0.3  # How often a load finds what the word held before, if it may
MOST_PAST = 4
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


@dataclass
class Past:
    """What a word held until it changed."""

    change: int  # The number of the change, of all words
    when: float
    value: int


class StoreBuffers:
    """Those of all ranks of a job."""

    def __init__(self, scheduler: Scheduler, order: Order) -> None:
        self._scheduler, self._order = scheduler, order
        self._waiting: dict[int, list[Store]] = {}  # By rank
        self._chance = scheduler.random.choice(CHANCES)
        self._changes = 0  # Of words, that others see
        self._past: dict[int, deque[Past]] = {}  # By address
        self._fenced: dict[int, int] = {}  # By rank: no load since then is older than this change
        self._seen: dict[tuple[int, int], int] = {}  # By rank and address: nor older than what was found there
        scheduler.fence, scheduler.acquire = self.fence, self.acquire

    def store(self, view: memoryview, place: int, address: int, value: int, *, is_awaited: bool = True) -> None:
        """Write a word that lies at this address. is_awaited: whether others may wait for it."""
        self._scheduler.act()
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
        if address in self._past and self._scheduler.current is not None:
            return self._find_early(address, value)
        return value

    def fence(self) -> None:
        """All that this rank has written is visible before it goes on, and what it reads is not older than this."""
        if self._order == "at once" or self._scheduler.current is None:
            return
        rank = self._scheduler.rank
        for store in self._waiting.pop(rank, ()):
            self._show(rank, store)
            if store.is_awaited:
                self._scheduler.change()
        self.acquire()

    def acquire(self) -> None:
        """What this rank reads from now on is not older than this."""
        if self._scheduler.current is not None:
            self._fenced[self._scheduler.rank] = self._changes

    def _show(self, rank: int, store: Store) -> None:
        """Others see it from now on."""
        if self._order == "reordered":
            self._changes += 1
            past = self._past.setdefault(store.address, deque(maxlen=MOST_PAST))
            past.append(Past(self._changes, self._scheduler.now, store.view[store.place]))
            self._seen[rank, store.address] = self._changes
        store.view[store.place] = store.value

    def _find_early(self, address: int, value: int) -> int:
        """What a load finds that may have come early: `value`, or what the word held before."""
        rank, now = self._scheduler.rank, self._scheduler.now
        first = max(self._fenced.get(rank, 0), self._seen.get((rank, address), 0))
        found, change = value, self._changes
        for each in self._past[address]:
            is_possible = each.change > first and now - each.when < LONGEST_SECONDS
            if is_possible and self._scheduler.random.random() < EARLY:
                found, change = each.value, each.change - 1
                break
        self._seen[rank, address] = change
        return found

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
                self._show(rank, store)
                self._scheduler.changes += store.is_awaited  # Not as a change of who looks
            if not waiting:
                del self._waiting[rank]
