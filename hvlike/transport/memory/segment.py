"""Shared memory that all ranks of one node map.

The first choice is a memfd: it has no name, leaves no file behind and does not count against /dev/shm. The peers open
it through /proc. Where that is forbidden, a file in /dev/shm serves; it is unlinked as soon as every peer has mapped
it. One rank makes an offer and the others accept it. `share` does both with blocking MPI calls, Fabric.share does the
same with messages.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hvlike.errors import LaunchError
from hvlike.transport.memory.dtypes import Array

T = TypeVar("T")

_COOKIE_BYTES = 16


@dataclass(frozen=True)
class Offer:
    """Where to find a segment that another process of this node has made."""

    path: str
    nbytes: int
    cookie: bytes


class Segment:
    """A piece of shared memory: `array` is all of it as bytes, `address` where it starts."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.array: Array = np.frombuffer(mapping, dtype=np.uint8)
        self.address: int = self.array.ctypes.data

    @classmethod
    def private(cls, nbytes: int) -> Segment:
        """A segment for a rank that is alone on its node."""
        return cls(mmap.mmap(-1, nbytes))

    def advise(self, advice: int, start: int, length: int) -> None:
        """Tell the system how these pages will be used, see madvise(2). Raises: OSError."""
        self._mapping.madvise(advice, start, length)


class SegmentOffer:
    """A segment being offered; `withdraw` once all have accepted, so that no trace of it remains."""

    def __init__(self, nbytes: int, *, memfd: bool) -> None:
        self._memfd = memfd
        self.segment: Segment | None = None
        if memfd:
            self._file = os.memfd_create("hvlike", os.MFD_CLOEXEC)
            self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
            self._file, self._path = tempfile.mkstemp(prefix="hvlike-", dir=folder)
        try:
            os.ftruncate(self._file, nbytes)
            if not memfd:
                # A file beyond the room left would be a SIGBUS at the first write: ask for the pages now.
                os.posix_fallocate(self._file, 0, nbytes)
            self.segment = Segment(mmap.mmap(self._file, nbytes))
        except OSError:
            self.withdraw()
            raise
        cookie = os.urandom(_COOKIE_BYTES)
        self.segment.array[:_COOKIE_BYTES] = np.frombuffer(cookie, dtype=np.uint8)
        self.offer = Offer(self._path, nbytes, cookie)

    def withdraw(self) -> None:
        os.close(self._file)
        if not self._memfd:
            os.unlink(self._path)
        if self.segment is not None:
            self.segment.array[:_COOKIE_BYTES] = 0


def accept(offer: Offer) -> Segment | None:
    """Map an offered segment, or None where this process cannot reach that memory."""
    try:
        file = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != offer.nbytes:
            return None
        segment = Segment(mmap.mmap(file, offer.nbytes))
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    # Another PID namespace can have a process of that number with a file of that number.
    return segment if segment.array[:_COOKIE_BYTES].tobytes() == offer.cookie else None


def make_offer(nbytes: int, attempt: int) -> SegmentOffer | None:
    """The offer of this attempt (0: memfd, 1: file), or None where the system refuses it."""
    try:
        return SegmentOffer(nbytes, memfd=attempt == 0)
    except OSError:
        return None


_ATTEMPTS = 2


Exchange = Generator[Any, None, T]  # Steps of an exchange: a coroutine, or it never yields and calls block


def share_steps(
    nbytes: int, *, leads: bool, tell: Callable[[Any], Exchange[Any]], collect: Callable[[bool], Exchange[bool]]
) -> Exchange[Segment | None]:
    """One zeroed segment for all ranks that run this; None where they cannot share so much. One rank `leads`: `tell`
    gives its value to all, `collect` tells it whether all say yes.
    """
    for attempt in range(_ATTEMPTS):
        made = make_offer(nbytes, attempt) if leads else None
        offer: Offer | None = yield from tell(made.offer if made else None)
        segment = made.segment if made else accept(offer) if offer else None
        agreed = yield from collect(segment is not None)
        if made:
            # No rank may write before the cookie is gone: they wait for the answer that follows.
            made.withdraw()
        agreed = yield from tell(agreed)
        if agreed:
            return segment
    return None


def share(comm: Any, nbytes: int) -> Segment:
    """`share_steps` for the ranks of `comm`, blocking, for init(). Raises: LaunchError on every rank if it is None."""

    def now(value: T) -> Exchange[T]:
        yield from ()
        return value

    steps = share_steps(
        nbytes,
        leads=comm.rank == 0,
        tell=lambda value: now(comm.bcast(value, root=0)),
        collect=lambda ok: now(all(comm.allgather(ok))),
    )
    try:
        next(steps)
    except StopIteration as stop:
        if stop.value is not None:
            segment: Segment = stop.value
            return segment
    raise LaunchError(
        f"the ranks of this node cannot share {nbytes} bytes of memory: neither a memfd opened through /proc "
        f"nor a file in /dev/shm works. Give the container more shared memory (docker run --shm-size=256m) "
        "or let the ranks see each other's processes (one PID namespace)."
    )


def words(segment: Segment, offset: int, count: int) -> memoryview:
    """`count` 8-byte counters from byte `offset` on; an index costs some 15 ns."""
    return segment.array[offset : offset + 8 * count].data.cast("Q")
