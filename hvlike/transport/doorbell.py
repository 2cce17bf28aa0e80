"""Doorbells: how a rank waits for the other ranks of its node, and how they wake it.

Each rank of a node has two semaphores and two words in one shared segment. One semaphore wakes
whoever drives the rank's loop, the other wakes the background thread when nobody does; the word
`driven` says which of them to post. The word `asleep` lets a peer that only advanced a counter skip
the post when the rank is awake and will look at the counter anyway.
"""

from __future__ import annotations

from hvlike.transport.segment import Segment, address_of, words
from hvlike.transport.semaphore import SEMAPHORE_BYTES, Fence, Semaphore

BELL_BYTES = 4 * SEMAPHORE_BYTES
_DRIVEN, _ASLEEP, _PROCESS = range(3)


class Doorbell:
    """The doorbell of one rank, seen from any rank of its node."""

    def __init__(self, segment: Segment, index: int, fence: Fence) -> None:
        start = index * BELL_BYTES
        self._segment = segment
        self._driver = Semaphore(address_of(segment, start))
        self._idle = Semaphore(address_of(segment, start + SEMAPHORE_BYTES))
        self._words = words(segment, start + 2 * SEMAPHORE_BYTES, 4)
        self._fence = fence

    # -- for everybody ------------------------------------------------------------------------

    def ring(self) -> None:
        """Wake the rank: a message or a piece of work is there for it. Never lost.

        The word is read again after the post: a driver that left in between cleared it before it
        took what was posted, so one of the two sees the other.
        """
        driven = self._words[_DRIVEN]
        (self._driver if driven else self._idle).post()
        if self._words[_DRIVEN] != driven:
            (self._idle if driven else self._driver).post()

    def ring_idle(self) -> None:
        """Wake a background thread of the rank, whoever drives: there is work of another kind for it."""
        self._idle.post()

    def nudge(self) -> None:
        """Wake the rank's driver if it sleeps; call the fence after the last store and before this."""
        if self._words[_ASLEEP]:
            self._driver.post()

    @property
    def process(self) -> int:
        """The process id of the rank."""
        return self._words[_PROCESS]

    # -- for the rank itself ------------------------------------------------------------------

    def initialise(self, process: int) -> None:
        """Set the semaphores up; before any peer looks."""
        self._driver.initialise()
        self._idle.initialise()
        self._words[_PROCESS] = process

    def enter(self) -> None:
        """A driver is there from now on."""
        self._words[_DRIVEN] = 1

    def leave(self) -> bool:
        """No driver from now on; True when somebody rang in the meantime, so that there is work left."""
        self._words[_DRIVEN] = 0
        self._fence()
        return self.rung()

    def rung(self) -> bool:
        """Take what was posted for the driver; True if anything was."""
        rung = self._driver.try_wait()
        while rung and self._driver.try_wait():
            pass
        return rung

    def rung_politely(self) -> bool:
        """`rung`, which lets other threads of this process in while it looks."""
        return self._driver.try_wait_politely() and (self.rung() or True)

    def prepare_sleep(self) -> None:
        """Say that the driver is about to sleep; it must look at all counters once more after this."""
        self._words[_ASLEEP] = 1
        self._fence()

    def sleep(self, seconds: float) -> bool:
        """Sleep as the driver until rung or nudged; call prepare_sleep first and awake afterwards."""
        return self._driver.wait(seconds)

    def awake(self) -> None:
        """The driver is up again."""
        self._words[_ASLEEP] = 0

    def sleep_idle(self, seconds: float) -> bool:
        """Sleep as the background thread, until rung while nobody drives."""
        return self._idle.wait(seconds)
