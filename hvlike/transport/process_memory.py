"""Copies between the memory of this process and that of another one of the same machine and user.

Source: process_vm_readv(2), Linux 3.2. A container or a security module may forbid it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any


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
    _move("process_vm_readv", process, theirs, mine, nbytes)


def write(process: int, theirs: int, mine: int, nbytes: int) -> None:
    """Copy `nbytes` from the address `mine` here to the address `theirs` of a process. Raises: OSError."""
    _move("process_vm_writev", process, theirs, mine, nbytes)


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


def _function(name: str) -> Any:
    function: Any = getattr(_library, name)
    function.argtypes = _ARGUMENTS
    function.restype = ctypes.c_ssize_t
    return function


_functions = {name: _function(name) for name in ("process_vm_readv", "process_vm_writev")}
