"""POSIX semaphores in shared memory, called through libc: the cheapest prompt way to wait for a local process.

Source: POSIX.1-2017 sem_init(3), sem_post(3), sem_clockwait (glibc 2.30).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from functools import partial

SEMAPHORE_BYTES = 64  # Room for one sem_t (32 bytes on 64-bit Linux) with a cache line of its own
_CLOCK_MONOTONIC = 1


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
