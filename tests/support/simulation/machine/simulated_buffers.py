"""Memory that is given to a simulated MPI, its datatypes and its operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Constant:
    """One of MPI's that has no value of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


IN_PLACE, ERRORS_RETURN = Constant("IN_PLACE"), Constant("ERRORS_RETURN")


@dataclass(frozen=True)
class Datatype:
    name: str
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def Get_size(self) -> int:
        return self.size


@dataclass(frozen=True)
class Op:
    name: str
    reduce: Callable[[Array, Array], Array]


DATATYPES = {
    name: Datatype(name, np.dtype(kind))
    for name, kind in (("BYTE", "u1"), ("INT", "i4"), ("INT64_T", "i8"), ("FLOAT", "f4"), ("DOUBLE", "f8"))
}
OPS = {"MAX": Op("MAX", np.maximum), "MIN": Op("MIN", np.minimum), "SUM": Op("SUM", np.add)}


def memory_of(buffer: Any, *, writes: bool) -> tuple[Array, Datatype]:
    """View the bytes of a buffer, given alone or as [buffer, datatype] or [buffer, count, datatype].

    Raises: ValueError: It does not lie in one piece, is too short, or may not be written to.
    """
    given, *rest = buffer if isinstance(buffer, (list, tuple)) else (buffer,)
    array: Array = given if isinstance(given, np.ndarray) else np.asarray(memoryview(given))
    if not array.flags.c_contiguous or (writes and not array.flags.writeable):
        raise ValueError("MPI is given memory in pieces, or memory to write to that is only to be read")
    datatype = rest[-1] if rest else next((each for each in DATATYPES.values() if each.dtype == array.dtype), None)
    if not isinstance(datatype, Datatype):
        given_type = repr(rest[-1]) if rest else f"elements of {array.dtype}"
        raise ValueError(f"MPI is given {given_type}, which is no datatype of the simulated MPI")
    memory: Array = array.reshape(-1).view(np.uint8)
    nbytes = memory.nbytes if len(rest) < 2 else rest[0] * datatype.size
    if nbytes > memory.nbytes or nbytes % datatype.size:
        raise ValueError(f"MPI is given {memory.nbytes} bytes of memory for {nbytes} bytes of {datatype.name}")
    return memory[:nbytes], datatype


def elements_of(memory: Array, datatype: Datatype) -> Array:
    """Copy bytes as elements."""
    elements: Array = memory.copy().view(datatype.dtype)
    return elements
