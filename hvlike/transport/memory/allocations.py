"""Memory for tensors that the ranks of one node share: the registry of allocations and their copies.

One allocation is one segment with a copy for each rank, at least a page apart. Every rank maps all of it:

    copy of the first rank | copy of the second | ...

On each rank an allocation lives until the last tensor over this rank's own copy is gone.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvlike.system.mapped_memory import Segment
from hvlike.transport.memory.dtypes import Array

_POPULATE_WRITE = 23  # Linux 5.14: get the pages now, with an error where a later write would be a SIGBUS


class Allocation:
    def __init__(self, number: tuple[int, int], ranks: Sequence[int], rank: int, nbytes: int, segment: Segment) -> None:
        """number: of the allocation, on all ranks. ranks: of the world, with a copy of `nbytes`; rank: this one."""
        self.number = number
        self.rank = rank
        self.nbytes = nbytes
        self._segment = segment
        self._stride = spread(nbytes)
        self._place = {each: index for index, each in enumerate(ranks)}
        self._own = self._place[rank] * self._stride
        self.start: int = segment.address + self._own
        self.works: dict[tuple[int, int], Any] = {}  # Kept for operations on a place of this copy

    def includes(self, ranks: Sequence[int]) -> bool:
        return all(rank in self._place for rank in ranks)

    def copy(self, rank: int) -> Array:
        first = self._place[rank] * self._stride
        view: Array = self._segment.array[first : first + self.nbytes]
        return view

    def populate(self) -> bool:
        """Take the pages of the own copy from the system, near this rank; False where it has not got them."""
        try:
            self._segment.advise(_POPULATE_WRITE, self._own, self._stride)
        except OSError as error:
            # An older system does not know the advice and takes the pages as they are written.
            return error.errno == errno.EINVAL
        return True


class Allocations:
    """The shared allocations of this process, found by address. Adds and looks up in the loop, forgets anywhere."""

    def __init__(self) -> None:
        self.by_start: dict[int, Allocation] = {}
        self._starts: list[int] | None = []
        self._made: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.by_start)

    def next_number(self, group: int) -> tuple[int, int]:
        self._made[group] = self._made.get(group, 0) + 1
        return (group, self._made[group])

    def add(self, allocation: Allocation, storage: np.dtype[Any]) -> Array:
        """Register an allocation; returns this rank's copy as an array, to make a tensor of. The allocation is
        forgotten when that very array, which the tensor holds, is gone: in any thread, at any time.
        """
        own: Array = allocation.copy(allocation.rank).view(storage)
        self.by_start[allocation.start] = allocation
        self._starts = None
        weakref.finalize(own, self._forget, allocation.start).atexit = False
        return own

    def find(self, address: int, nbytes: int) -> tuple[Allocation, int] | None:
        """The allocation in whose own copy these bytes lie, and where in it; None if they lie elsewhere."""
        starts = self._starts
        if starts is None:
            # Never short of one, as only the loop adds; one too many, forgotten meanwhile, is not found below.
            starts = self._starts = sorted(self.by_start)
        index = bisect.bisect_right(starts, address) - 1
        if index < 0:
            return None
        allocation = self.by_start.get(starts[index])
        if allocation is None:
            return None
        offset = address - allocation.start
        return (allocation, offset) if offset + nbytes <= allocation.nbytes else None

    def _forget(self, start: int) -> None:
        self.by_start.pop(start, None)
        self._starts = None


def spread(nbytes: int) -> int:
    """Bytes from one copy to the next: whole pages, so that each copy can lie near its rank."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def available_bytes(root: Path = Path("/")) -> int | None:
    """How much memory the system, or the container this runs in, can still give; None where nobody says."""
    limits = []
    said = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in said:
        limits.append(said["MemAvailable:"] * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        group = root / "sys/fs/cgroup" / line.rpartition(":")[2].lstrip("/")
        most, used = _lines(group / "memory.max"), _lines(group / "memory.current")
        if most and used and most[0].isdigit():
            # Files that nobody has used of late are given up before anything fails.
            files = _numbers(group / "memory.stat").get("inactive_file", 0)
            limits.append(max(0, int(most[0]) - int(used[0]) + files))
    return min(limits) if limits else None


def _numbers(path: Path) -> dict[str, int]:
    pairs = [line.split()[:2] for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
