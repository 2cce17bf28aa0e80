"""Copies between the memory of this process and that of another one of the same machine and user.

Source: process_vm_readv(2), Linux 3.2. A container or a security module may forbid it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_READ, _WRITE = "process_vm_readv", "process_vm_writev"


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


# CDLL lets other threads of this process run meanwhile.
_library = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (
    ctypes.c_int,
    ctypes.POINTER(_Range),
    ctypes.c_ulong,
    ctypes.POINTER(_Range),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def read(process: int, theirs: int, mine: int, nbytes: int) -> None:
    """Copy `nbytes` from the address `theirs` of a process to the address `mine` here. Raises: OSError."""
    _move(_READ, process, theirs, mine, nbytes)


def write(process: int, theirs: int, mine: int, nbytes: int) -> None:
    """Copy `nbytes` from the address `mine` here to the address `theirs` of a process. Raises: OSError."""
    _move(_WRITE, process, theirs, mine, nbytes)


def _move(name: str, process: int, theirs: int, mine: int, nbytes: int) -> None:
    # The system stops early where it likes, and says how far it came.
    function = _functions[name]
    moved = 0
    while moved < nbytes:
        here = _Range(mine + moved, nbytes - moved)
        there = _Range(theirs + moved, nbytes - moved)
        step = function(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if step <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name} with process {process}: {os.strerror(number)}")
        moved += step


class ProcessMemory:
    """The memory of one process, for many copies of known size; used by one thread at a time."""

    __slots__ = ("_here", "_process", "_ranges", "_there")

    def __init__(self, process: int) -> None:
        self._process = process
        self._here, self._there = _Range(), _Range()
        self._ranges = (ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0)

    def read(self, theirs: int, mine: int, nbytes: int) -> None:
        """See read(). Raises: OSError."""
        self._move(_READ, theirs, mine, nbytes)

    def write(self, theirs: int, mine: int, nbytes: int) -> None:
        """See write(). Raises: OSError."""
        self._move(_WRITE, theirs, mine, nbytes)

    # Its lines are run between copies that empty the caches: few of them, and no new objects.
    def _move(self, name: str, theirs: int, mine: int, nbytes: int) -> None:
        here, there = self._here, self._there
        here.address, there.address = mine, theirs
        here.nbytes = there.nbytes = nbytes
        moved = _functions[name](self._process, *self._ranges)
        if moved != nbytes:
            moved = max(moved, 0)
            _move(name, self._process, theirs + moved, mine + moved, nbytes - moved)


def _function(name: str) -> Any:
    function: Any = getattr(_library, name)
    function.argtypes = _ARGUMENTS
    function.restype = ctypes.c_ssize_t
    return function


_functions = {name: _function(name) for name in (_READ, _WRITE)}
