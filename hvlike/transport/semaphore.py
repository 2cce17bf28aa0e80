"""POSIX semaphores in shared memory, through libc: the cheapest prompt way to wait for a local process.

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
