"""The table of torch dtypes: how each one is moved and reduced. Only listed dtypes reach MPI.

Moving needs no arithmetic: every dtype of the table travels as bytes. numpy reduces the types that it computes
natively, torch reduces the 16-bit floats (numpy has no bfloat16, and its float16 addition is 30 times slower than
torch's). MPI reduces none of them: bfloat16 as bytes or not at all, and a minimum by the order of the ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from hvlike.errors import UsageError
from hvlike.system.system import system

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Kind(enum.Enum):
    BOOL = "bool"
    INTEGER = "integer"
    HALF = "16-bit float"
    FLOAT = "float"
    COMPLEX = "complex"


@dataclass(frozen=True)
class Element:
    """One line of the table: how elements of one torch dtype are stored and reduced."""

    dtype: torch.dtype
    kind: Kind
    storage: np.dtype[Any]  # numpy's type of the same width: the type itself, or uint16 for the 16-bit floats

    @property
    def itemsize(self) -> int:
        return int(self.storage.itemsize)


_LINES = (
    Element(torch.uint8, Kind.INTEGER, np.dtype(np.uint8)),
    Element(torch.int8, Kind.INTEGER, np.dtype(np.int8)),
    Element(torch.int16, Kind.INTEGER, np.dtype(np.int16)),
    Element(torch.int32, Kind.INTEGER, np.dtype(np.int32)),
    Element(torch.int64, Kind.INTEGER, np.dtype(np.int64)),
    Element(torch.float16, Kind.HALF, np.dtype(np.uint16)),
    Element(torch.bfloat16, Kind.HALF, np.dtype(np.uint16)),
    Element(torch.float32, Kind.FLOAT, np.dtype(np.float32)),
    Element(torch.float64, Kind.FLOAT, np.dtype(np.float64)),
    Element(torch.bool, Kind.BOOL, np.dtype(np.bool_)),
    Element(torch.complex64, Kind.COMPLEX, np.dtype(np.complex64)),
    Element(torch.complex128, Kind.COMPLEX, np.dtype(np.complex128)),
)

TABLE: dict[torch.dtype, Element] = {line.dtype: line for line in _LINES}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def element_of(dtype: torch.dtype) -> Element:
    """The line of the table for `dtype`. Raises: UsageError, which lists the dtypes of the table."""
    element = TABLE.get(dtype)
    if element is None:
        known = ", ".join(dtype_name(each) for each in TABLE)
        raise UsageError(
            f"dtype {dtype_name(dtype)} cannot be communicated; expected one of: {known}. Convert the tensor first."
        )
    return element


def check_movable(tensor: torch.Tensor) -> Element:
    """The line of the table for a tensor whose bytes can be sent and received in place. Raises: UsageError for any
    other, with what to call.
    """
    element = element_of(tensor.dtype)
    if tensor.layout is not torch.strided:
        wrong = f"a dense tensor, got layout {tensor.layout}; convert it with to_dense()."
    elif tensor.device.type != "cpu":
        wrong = f"a tensor in host memory, got one on device {tensor.device}; copy it with cpu()."
    elif not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        wrong = f"a contiguous tensor, got shape {shape} with strides {strides}; call contiguous() on it."
    elif tensor.is_conj() or tensor.is_neg():
        wrong = (
            "a tensor that holds its own values, got a lazy conjugate or negative; call resolve_conj() or "
            "resolve_neg() on it."
        )
    else:
        return element
    raise UsageError(f"expected {wrong}")


def storage_view(tensor: torch.Tensor) -> Array:
    """View a contiguous CPU tensor as a 1-D numpy array of the storage dtype, uint16 for the 16-bit floats, without a
    copy. Raises: UsageError as check_movable does.
    """
    element = check_movable(tensor)
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() != 1:
        flat = flat.view(-1)
    if element.kind is Kind.HALF:
        flat = flat.view(torch.uint16)
    array: Array = flat.numpy()
    return array


class _Memory:
    """Memory that somebody else keeps, as numpy asks for it; or `keeper` does, as long as there is a view of it."""

    def __init__(self, address: int, nbytes: int, keeper: object = None) -> None:
        self.keeper = keeper
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


FIRST_ADDRESS = 4096
EVERYTHING: Array = np.asarray(_Memory(FIRST_ADDRESS, 1 << 56))
"""All of memory from FIRST_ADDRESS on: to slice it costs a tenth of what it costs to view a tensor anew."""


def bytes_at(address: int, nbytes: int) -> Array:
    """View `nbytes` bytes of memory as numpy's uint8. Nothing keeps that memory: use it only while somebody does."""
    first = address - FIRST_ADDRESS
    if first < 0 and nbytes:
        raise _without_address()
    view: Array = EVERYTHING[first : first + nbytes]
    return view


def runs_at(addresses: Sequence[int], runs: Iterable[tuple[int, int, int]]) -> list[Array]:
    """`bytes_at` of many runs (tensor, first byte, bytes) of tensors that begin at these addresses, in one frame."""
    start = FIRST_ADDRESS
    if not all(addresses):
        runs = list(runs)
        if any(nbytes and not addresses[tensor] for tensor, _, nbytes in runs):
            raise _without_address()
    return [
        EVERYTHING[addresses[tensor] + offset - start : addresses[tensor] + offset - start + nbytes]
        for tensor, offset, nbytes in runs
    ]


def raw_view(tensor: torch.Tensor) -> Array:
    """View the bytes of a contiguous CPU tensor as 1-D uint8, not copied. Raises: UsageError as check_movable does."""
    check_movable(tensor)
    return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> Array:
    """View the bytes of a tensor as raw_view does, without a check, and keep its memory.

    After tensor.numpy() torch refuses for ever to resize that memory; FSDP does so with what it has gathered.
    """
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if not address and nbytes:
        raise _without_address()
    view: Array = np.asarray(_Memory(address or FIRST_ADDRESS, nbytes, tensor))
    return view


def _without_address() -> UsageError:
    """Every call refuses such tensors before (own_memory.py): the last guard before memory is read where none is."""
    return UsageError(
        "expected a tensor with memory of its own, got one without an address, made under a mode of torch that makes "
        "such tensors (FakeTensorMode, functionalize); make the call outside of it."
    )


class MpiConstants:
    """Constants of the MPI that is running. Made only where a communicator exists, so MPI has been started."""

    def __init__(self) -> None:
        if system.mpi is not None:
            MPI = system.mpi()
        else:
            from mpi4py import MPI

        self.in_place: Any = MPI.IN_PLACE
        self.byte: Any = MPI.BYTE
        self.int64: Any = MPI.INT64_T
        self.max: Any = MPI.MAX
