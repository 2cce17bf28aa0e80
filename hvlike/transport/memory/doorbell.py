"""Doorbells: how a rank waits for the other ranks of its node, and how they wake it.

A doorbell is built from POSIX semaphores in shared memory, called through libc: the cheapest prompt way to wait for
a local process. Each rank has two semaphores and a few words in one segment of the node:

    driver semaphore   wakes the thread that drives the rank's loop
    idle semaphore     wakes a background thread when no thread drives
    word `driven`      says which of the two a peer has to post
    word `asleep`      lets a peer that only advanced a counter skip the post while the rank is awake

Source: POSIX.1-2017 sem_init(3), sem_post(3), sem_clockwait (glibc 2.30).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
import time
from contextlib import AbstractContextManager

from hvlike.transport.memory.segment import Segment, address_of, words

SEMAPHORE_BYTES = 64
"""Room for one sem_t (32 bytes on 64-bit Linux) with a cache line of its own."""

_CLOCK_MONOTONIC = 1

X86 = platform.machine() in ("x86_64", "AMD64", "i686")
"""Stores become visible in order, loads keep their order, and what locks memory is a full barrier."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# PyDLL keeps the GIL: right for calls that return at once. CDLL releases it: right for the one that sleeps.
_quick = ctypes.PyDLL(None)
_sleeping = ctypes.CDLL(None, use_errno=True)
_post = _quick.sem_post
_trywait = _quick.sem_trywait
_HAS_CLOCKWAIT = hasattr(_sleeping, "sem_clockwait")


class Semaphore:
    """A process-shared counting semaphore at a fixed address; the memory must outlive the object."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def initialise(self) -> None:
        """Set the count to 0. One process does this, before any other uses the semaphore."""
        if _sleeping.sem_init(self._address, 1, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"sem_init: {os.strerror(number)}")

    def post(self) -> None:
        """Add one to the count; wakes one sleeper. A release of all that was written before."""
        _post(self._address)

    def try_wait(self) -> bool:
        """Take one from the count if there is one; never sleeps."""
        return bool(_trywait(self._address) == 0)

    def try_wait_politely(self) -> bool:
        """`try_wait`, which lets other threads of this process in."""
        return bool(_sleeping.sem_trywait(self._address) == 0)

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
    """A full memory barrier, made of a post and a take of a private semaphore, or of a lock on x86.

    Both are atomic read-modify-writes of one location, a release followed by an acquire: nothing
    moves across the pair on x86 (locked instructions) nor on aarch64 (release-acquire order). Taking
    and releasing a lock are locked instructions too, and cost less than two calls through ctypes.
    """

    __slots__ = ("barrier",)

    def __init__(self) -> None:
        self.barrier: AbstractContextManager[object] = threading.Lock() if X86 else _Pair()
        """To enter and leave it is the fence, in the frame of who does that."""

    def __call__(self) -> None:
        with self.barrier:
            pass


class _Pair:
    """A private semaphore that is posted and taken."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        self._semaphore = Semaphore(ctypes.addressof(self._memory))
        self._semaphore.initialise()

    def __enter__(self) -> None:
        self._semaphore.post()

    def __exit__(self, *_: object) -> None:
        self._semaphore.try_wait()


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
        self.asleep = self._words[_ASLEEP : _ASLEEP + 1]
        """One word, for callers that look often: other than 0 while the rank's driver sleeps. Read only."""
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

    def notify_if_sleeping(self) -> None:
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
