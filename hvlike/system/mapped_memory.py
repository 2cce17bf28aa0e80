"""Shared memory of the processes of one node: a memfd that others open through /proc, or a file in /dev/shm.

A memfd has no name, leaves no file behind and does not count against /dev/shm. Where opening it through /proc is
forbidden, a file serves; it is unlinked as soon as every peer has mapped it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

_COOKIE_BYTES = 16


@dataclass(frozen=True)
class SegmentLocation:
    """Where to find a segment that another process of this node has made."""

    path: str
    nbytes: int
    cookie: bytes


class Segment:
    """A piece of shared memory: `array` is all of it as bytes, `address` where it starts."""

    def __init__(self, mapping: mmap.mmap) -> None:
        # Only here: `hvlike launch` reaches the system without numpy.
        import numpy as np

        self._mapping = mapping
        self.array: npt.NDArray[Any] = np.frombuffer(mapping, dtype=np.uint8)
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
        self.segment.array.data[:_COOKIE_BYTES] = cookie
        self.offer = SegmentLocation(self._path, nbytes, cookie)

    def withdraw(self) -> None:
        os.close(self._file)
        if not self._memfd:
            os.unlink(self._path)
        if self.segment is not None:
            self.segment.array[:_COOKIE_BYTES] = 0


def accept(offer: SegmentLocation) -> Segment | None:
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


def words(segment: Segment, offset: int, count: int) -> memoryview:
    """`count` 8-byte counters from byte `offset` on; an index costs some 15 ns."""
    return segment.array[offset : offset + 8 * count].data.cast("Q")
