"""Doorbells: how a rank waits for the other ranks of its node, and how they wake it.

Each rank has two semaphores and a few words in one segment of the node:

    driver semaphore   wakes the thread that drives the rank's loop
    idle semaphore     wakes a background thread when no thread drives
    word `driven`      says which of the two a peer has to post
    word `asleep`      lets a peer that only advanced a counter skip the post while the rank is awake; a driver that
                       sleeps on sockets (loop/socket_events.py) gets a datagram as well

"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from hvlike.system.mapped_memory import Segment
from hvlike.system.semaphore import SEMAPHORE_BYTES
from hvlike.system.system import system


class Fence:
    """A full memory barrier: a lock on x86 (locked instructions), elsewhere a post and a take of a private semaphore: a
    release followed by an acquire of one location, which nothing moves across.
    """

    __slots__ = ("barrier",)

    def __init__(self) -> None:
        self.barrier: AbstractContextManager[object] = system.Lock() if system.orders_stores else _Pair()
        """To enter and leave it is the fence, in the frame of who does that."""

    def __call__(self) -> None:
        with self.barrier:
            pass


class _Pair:
    def __init__(self) -> None:
        self._memory = system.private(SEMAPHORE_BYTES)
        self._semaphore = system.semaphore(self._memory, 0)
        self._semaphore.initialise()

    def __enter__(self) -> None:
        self._semaphore.post()

    def __exit__(self, *_: object) -> None:
        self._semaphore.take()


BELL_BYTES = 4 * SEMAPHORE_BYTES
_DRIVEN, _ASLEEP, _PROCESS, _SOCKET = range(4)
ON_SEMAPHORE, ON_SOCKETS = 1, 2  # How a driver sleeps


class Doorbell:
    """The doorbell of one rank, seen from any rank of its node."""

    def __init__(
        self, segment: Segment, index: int, fence: Fence, send: Callable[[int], object] = lambda token: None
    ) -> None:
        """send: wakes a driver that sleeps on sockets, by the token given to `initialise`."""
        start = index * BELL_BYTES
        self._segment = segment
        self._driver = system.semaphore(segment, start)
        self._idle = system.semaphore(segment, start + SEMAPHORE_BYTES)
        self._words = system.words(segment, start + 2 * SEMAPHORE_BYTES, 4)
        self.asleep = self._words[_ASLEEP : _ASLEEP + 1]
        """One word, for callers that look often: other than 0 while the rank's driver sleeps. Read only."""
        self._fence = fence
        self._send = send
        self._posts = (self._idle.post, self._driver.post)
        self._take = self._driver.take
        self.ring_idle = self._idle.post
        """Wake a background thread of the rank, whoever drives."""
        self._summons: deque[None] = deque()  # Its length counts

    # -- for all ranks of the node ------------------------------------------------------------

    def ring(self) -> None:
        """Wake the rank: a message or a piece of work is there for it. Never lost: a driver that left meanwhile cleared
        the word before it took what was posted, so one of the two sees the other.
        """
        driven = self._words[_DRIVEN]
        self._posts[driven]()
        if self._words[_DRIVEN] != driven:
            self._posts[1 - driven]()
        if self._words[_ASLEEP] == ON_SOCKETS:
            self._send(self._words[_SOCKET])

    def notify_if_sleeping(self) -> None:
        """Wake the rank's driver if it sleeps; call the fence after the last store and before this."""
        how = self._words[_ASLEEP]
        if how:
            self._posts[1]()
            if how == ON_SOCKETS:
                self._send(self._words[_SOCKET])

    @property
    def process(self) -> int:
        return self._words[_PROCESS]

    # -- for the rank itself ------------------------------------------------------------------

    def initialise(self, process: int, token: int = 0) -> None:
        """token: what others wake the rank by where it sleeps on sockets."""
        self._driver.initialise()
        self._idle.initialise()
        self._words[_PROCESS], self._words[_SOCKET] = process, token

    def enter(self) -> None:
        self._words[_DRIVEN] = 1

    def leave(self) -> bool:
        """No driver from now on; True when the doorbell rang in the meantime, so that there is work left."""
        self._words[_DRIVEN] = 0
        with self._fence.barrier:
            pass
        return self.rung()

    def rung(self) -> bool:
        """Take what was posted for the driver; True if anything was."""
        if self._take():
            return False
        while not self._take():
            pass
        return True

    def rung_politely(self) -> bool:
        """`rung`, but other threads of this process may run meanwhile."""
        return not self._driver.take_politely() and (self.rung() or True)

    def prepare_sleep(self, how: int = ON_SEMAPHORE) -> None:
        """Announce that the driver is about to sleep; it must check all counters once more after this."""
        self._words[_ASLEEP] = how
        self._fence()

    def sleep(self, seconds: float) -> bool:
        """Sleep as the driver until rung or notified; call prepare_sleep first and awake afterwards."""
        return self._driver.wait(seconds)

    def awake(self) -> None:
        self._words[_ASLEEP] = 0

    def summon(self) -> None:
        """Wake a background thread for work of another kind."""
        self._summons.append(None)
        self.ring_idle()

    def was_summoned(self) -> bool:
        """Whether a background thread that has just been rung may leave that to others, as it has work of that kind:
        as often as there were summons. Any other ring is for the loop, and has to be heard there.
        """
        try:
            self._summons.pop()
        except IndexError:
            return False
        return True

    def sleep_idle(self, seconds: float) -> bool:
        """Sleep as the background thread, until rung while no thread drives."""
        return self._idle.wait(seconds)
