"""Cross-memory attach (CMA): copies between this process and another one of the same machine and user.

A container or a security module may forbid it: then every call raises OSError.

Source: process_vm_readv(2), Linux 3.2.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

_READ, _WRITE = "process_vm_readv", "process_vm_writev"


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


# CDLL lets other threads of this process run meanwhile.
_library = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)

ROW_BYTES = ctypes.sizeof(_Range)

MOST_RANGES = 1024  # How many ranges the system takes in one call: UIO_MAXIOV


def _move(name: str, process: int, theirs: int, mine: int, nbytes: int) -> None:
    # The system stops early where it likes, and says how far it came.
    function = FUNCTIONS[name]
    moved = 0
    while moved < nbytes:
        here = _Range(mine + moved, nbytes - moved)
        there = _Range(theirs + moved, nbytes - moved)
        step = function(process, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
        if step <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name} with process {process}: {os.strerror(number)}")
        moved += step


read = functools.partial(_move, _READ)
"""(process, theirs, mine, nbytes): copy from the address `theirs` of a process to `mine` here. Raises: OSError."""

write = functools.partial(_move, _WRITE)  # The same the other way round


class Ranges:
    """A table of ranges of memory, as the system reads it: their lengths stay, their addresses may change."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._table = np.zeros((len(lengths), 2), np.uint64)
        self._table[:, 1] = lengths
        self.addresses = self._table[:, 0]  # Where the ranges begin, for the caller to fill in
        self.start: int = self._table.ctypes.data  # The address of the table; row i lies ROW_BYTES * i after it


class ProcessMemory:
    """The memory of one process, be it this one, for many copies; used by one thread at a time."""

    __slots__ = ("_here", "_mine", "_process")

    def __init__(self, process: int) -> None:
        self._process = process
        self._here = _Range()
        self._mine = ctypes.addressof(self._here)

    # These lines run between copies that empty the caches: one frame, and no new objects.
    def gather(self, rows: int, count: int, mine: int, nbytes: int) -> None:
        """Copy `count` ranges, whose rows in a table begin at `rows`, one after another to the address `mine` here."""
        self._here.address, self._here.nbytes = mine, nbytes
        if FUNCTIONS[_READ](self._process, self._mine, 1, rows, count, 0) != nbytes:
            self._one_by_one(_READ, rows, count, mine)

    def scatter(self, rows: int, count: int, mine: int, nbytes: int) -> None:
        """Copy what lies at the address `mine` here to `count` ranges, the other way round. Raises: OSError."""
        self._here.address, self._here.nbytes = mine, nbytes
        if FUNCTIONS[_WRITE](self._process, self._mine, 1, rows, count, 0) != nbytes:
            self._one_by_one(_WRITE, rows, count, mine)

    def read(self, rows: int, mine: int, count: int, nbytes: int) -> None:
        """Copy `count` ranges, whose rows in a table begin at `rows`, to as many here, whose rows begin at `mine`."""
        if FUNCTIONS[_READ](self._process, mine, count, rows, count, 0) != nbytes:
            for row in range(0, count * ROW_BYTES, ROW_BYTES):
                self._one_by_one(_READ, rows + row, 1, _Range.from_address(mine + row).address)

    def _one_by_one(self, name: str, rows: int, count: int, mine: int) -> None:
        """The same once more, range by range: the system raises the reason why it stopped, or goes on."""
        for row in range(rows, rows + count * ROW_BYTES, ROW_BYTES):
            there = _Range.from_address(row)
            _move(name, self._process, there.address, mine, there.nbytes)
            mine += there.nbytes


def _function(name: str) -> Any:
    function: Any = getattr(_library, name)
    function.argtypes = _ARGUMENTS
    function.restype = ctypes.c_ssize_t
    return function


FUNCTIONS = {name: _function(name) for name in (_READ, _WRITE)}
