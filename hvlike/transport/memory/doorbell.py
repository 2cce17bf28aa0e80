"""Doorbells: how a rank waits for the other ranks of its node, and how they wake it.

A doorbell is built from POSIX semaphores in shared memory, called through libc: the cheapest prompt way to wait for
a local process. Each rank has two semaphores and a few words in one segment of the node:

    driver semaphore   wakes the thread that drives the rank's loop
    idle semaphore     wakes a background thread when no thread drives
    word `driven`      says which of the two a peer has to post
    word `asleep`      lets a peer that only advanced a counter skip the post while the rank is awake; a driver that
                       sleeps on sockets (loop/socket_events.py) gets a datagram as well

Source: POSIX.1-2017 sem_init(3), sem_post(3), sem_clockwait (glibc 2.30).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from hvlike.transport.memory.segment import Segment, words

SEMAPHORE_BYTES = 64  # Room for one sem_t (32 bytes on 64-bit Linux) with a cache line of its own
_CLOCK_MONOTONIC = 1

X86 = platform.machine() in ("x86_64", "AMD64", "i686")
"""Stores become visible in order, loads keep their order, and what locks memory is a full barrier."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# PyDLL keeps the GIL: right for calls that return at once. CDLL releases it: right for the one that sleeps.
_quick = ctypes.PyDLL(None)
_sleeping = ctypes.CDLL(None, use_errno=True)
_HAS_CLOCKWAIT = hasattr(_sleeping, "sem_clockwait")


class Semaphore:
    """A process-shared counting semaphore at a fixed address; the memory must outlive the object."""

    __slots__ = ("_address", "post", "take", "take_politely")

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        # Bound C functions, without a Python frame of their own: the hottest calls of a wait.
        self.post: Callable[[], int] = partial(_quick.sem_post, self._address)
        """Add one to the count; wakes one sleeper. A release of all that was written before."""
        self.take: Callable[[], int] = partial(_quick.sem_trywait, self._address)
        """Take one from the count and return 0, or return -1 if there is none; never sleeps."""
        self.take_politely: Callable[[], int] = partial(_sleeping.sem_trywait, self._address)
        """`take`, but other threads of this process may run meanwhile."""

    def initialise(self) -> None:
        """Set the count to 0. One process does this, before any other uses the semaphore."""
        if _sleeping.sem_init(self._address, 1, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"sem_init: {os.strerror(number)}")

    def wait(self, seconds: float) -> bool:
        """Sleep until the count can be taken from, at most `seconds`; a signal ends the sleep early."""
        if _HAS_CLOCKWAIT:
            status = _sleeping.sem_clockwait(self._address, _CLOCK_MONOTONIC, _deadline(time.monotonic() + seconds))
        else:
            status = _sleeping.sem_timedwait(self._address, _deadline(time.time() + seconds))
        if status == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, f"waiting for a semaphore: {os.strerror(number)}")
        return False


def _deadline(moment: float) -> object:
    seconds = int(moment)
    return ctypes.byref(_Timespec(seconds, int((moment - seconds) * 1e9)))


class Fence:
    """A full memory barrier: a lock on x86 (locked instructions), elsewhere a post and a take of a private semaphore: a
    release followed by an acquire of one location, which nothing moves across.
    """

    __slots__ = ("barrier",)

    def __init__(self) -> None:
        self.barrier: AbstractContextManager[object] = threading.Lock() if X86 else _Pair()
        """To enter and leave it is the fence, in the frame of who does that."""

    def __call__(self) -> None:
        with self.barrier:
            pass


class _Pair:
    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        self._semaphore = Semaphore(ctypes.addressof(self._memory))
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
        self._driver = Semaphore(segment.address + start)
        self._idle = Semaphore(segment.address + start + SEMAPHORE_BYTES)
        self._words = words(segment, start + 2 * SEMAPHORE_BYTES, 4)
        self.asleep = self._words[_ASLEEP : _ASLEEP + 1]
        """One word, for callers that look often: other than 0 while the rank's driver sleeps. Read only."""
        self._fence = fence
        self._send = send
        self._posts = (self._idle.post, self._driver.post)
        self._take = self._driver.take
        self.ring_idle = self._idle.post
        """Wake a background thread of the rank, whoever drives: there is work of another kind for it."""

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

    def sleep_idle(self, seconds: float) -> bool:
        """Sleep as the background thread, until rung while no thread drives."""
        return self._idle.wait(seconds)
