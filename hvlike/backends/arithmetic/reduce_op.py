"""The reductions that exist, their names, and the dtypes on which each is defined."""

from __future__ import annotations

import enum
from typing import TypeAlias

import torch

from hvlike.errors import UsageError, WrongTypeError
from hvlike.transport.memory.dtypes import Kind, dtype_name, element_of


class ReduceOp(enum.IntEnum):
    """A reduction over ranks; the numbers are Horovod's. Each has a text of its own."""

    def __new__(cls, value: int, text: str = "") -> ReduceOp:
        member = int.__new__(cls, value)
        member._value_ = value
        member.__doc__ = text
        return member

    AVERAGE = 0, "The mean over the ranks. Integers are cut off toward zero; 16-bit floats are added up in float32."
    SUM = 1, "The sum over the ranks; of bool the logical or."
    ADASUM = 2, "The adaptive sum (Maleki et al., 2021): what the ranks' tensors have in common counts once."
    MIN = 3, "The smallest value over the ranks, element by element; NaN wins. Of bool the logical and."
    MAX = 4, "The largest value over the ranks, element by element; NaN wins. Of bool the logical or."
    PRODUCT = 5, "The product over the ranks, element by element; of bool the logical and."


class BitwiseOp(enum.IntEnum):
    """A reduction of bits, which torch.distributed and MPI have and Horovod has not."""

    BAND = 16
    BOR = 17
    BXOR = 18


AnyOp: TypeAlias = ReduceOp | BitwiseOp

LIBRARY_NAMES: dict[AnyOp, str] = {
    ReduceOp.AVERAGE: "sum",
    ReduceOp.SUM: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "prod",
}
"""What MPI and NCCL call the element-wise reductions, in small letters; of an average the division is left."""

_ELEMENTWISE = frozenset(LIBRARY_NAMES)
_BITWISE = frozenset(BitwiseOp)

_SUPPORTED: dict[Kind, frozenset[AnyOp]] = {
    # Sum and Max of truth values are "or", Min and Product are "and"; a mean of them is no truth value.
    Kind.BOOL: _ELEMENTWISE - {ReduceOp.AVERAGE} | _BITWISE,
    Kind.INTEGER: _ELEMENTWISE | _BITWISE,
    Kind.HALF: _ELEMENTWISE | {ReduceOp.ADASUM},
    Kind.FLOAT: _ELEMENTWISE | {ReduceOp.ADASUM},
    # Complex numbers have no order.
    Kind.COMPLEX: frozenset({ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.PRODUCT}),
}


def op_name(op: AnyOp) -> str:
    return op.name.capitalize()


def reduce_op(value: int) -> ReduceOp:
    """The reduction with this number. Raises: UsageError, which lists them all."""
    try:
        return ReduceOp(value)
    except ValueError:
        known = ", ".join(f"{op_name(op)} ({op.value})" for op in ReduceOp)
        kind = UsageError if isinstance(value, int) else WrongTypeError
        raise kind(f"op {value!r} is not a reduction; expected one of: {known}.") from None


def check_supported(op: AnyOp, dtype: torch.dtype) -> None:
    """Raises: UsageError for a dtype that cannot be sent, or on which `op` is not defined; the text lists those."""
    supported = _SUPPORTED[element_of(dtype).kind]
    if op not in supported:
        possible = ", ".join(op_name(each) for each in ReduceOp if each in supported)
        raise UsageError(f"op {op_name(op)} is not defined on dtype {dtype_name(dtype)}; possible there: {possible}.")


def identity(op: ReduceOp, dtype: torch.dtype) -> float:
    """The value that changes nothing: what an absent rank stands for. Raises: UsageError as check_supported does."""
    check_supported(op, dtype)
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    kind = element_of(dtype).kind
    if kind is Kind.BOOL:
        return 1 if op is ReduceOp.MIN else 0
    if kind is Kind.INTEGER:
        limits = torch.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return float("inf") if op is ReduceOp.MIN else float("-inf")
