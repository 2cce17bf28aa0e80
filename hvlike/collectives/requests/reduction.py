"""Reductions: the ops, their factors, and a tensor as a reduction sees it (`Operand`).

Also what is refused: ops that are not defined on a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import AnyOp, ReduceOp, op_name, reduce_op
from hvlike.backends.base import ordinary
from hvlike.errors import UnsupportedOpError, UsageError, WrongTypeError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import dtype_name

_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16)


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: (2, 3, 4) -> (12, 4, 1)."""
    return torch.empty(tuple(shape), device="meta").stride()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements fill a piece of memory, each exactly once, in whatever order (channels_last, transposed)."""
    if 0 in shape:
        return True
    step = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(strides, shape, strict=True) if length != 1
    ):
        if stride != step:
            return False
        step *= length
    return True


def working_dtype(dtype: torch.dtype, op: AnyOp) -> torch.dtype:
    """The dtype to reduce in: a mean of narrow integers would overflow while it is summed."""
    return torch.int32 if op is ReduceOp.AVERAGE and dtype in _NARROW_INTEGERS else dtype


class Operand:
    """`work` holds `tensor` with its strides as agreed, `flat` its elements in their order; both share its memory where
    possible.
    """

    __slots__ = ("_tensor", "flat", "work")

    def __init__(
        self,
        tensor: torch.Tensor,
        strides: tuple[int, ...] | None,
        dtype: torch.dtype | None = None,
        home: torch.device | None = None,
    ) -> None:
        """strides: agreed, None for row by row; dtype: to reduce in; home: the backend's device, None for the host."""
        source = ordinary(tensor)
        dtype = dtype or source.dtype
        as_it_is = source.is_contiguous() if strides is None else source.stride() == strides
        is_home = source.is_cpu if home is None else source.device == home
        if as_it_is and source.dtype is dtype and is_home and not source.is_conj() and not source.is_neg():
            self._tensor = self.work = source
        else:
            agreed = row_by_row(source.shape) if strides is None else strides
            self._tensor = source
            with torch.inference_mode(False):
                self.work = torch.empty_strided(tuple(source.shape), agreed, dtype=dtype, device=home or "cpu")
            self.work.copy_(source)
        elements = self.work.numel()
        # A single element counts as contiguous with any stride, and view() would keep that stride.
        plain = strides is None and elements > 1
        self.flat = self.work.view(-1) if plain else self.work.as_strided((elements,), (1,))

    def write_back(self) -> None:
        if self.work is not self._tensor:
            self._tensor.copy_(self.work)


def reduce_operands(
    operands: Sequence[Operand], reduce: Callable[[torch.dtype, list[torch.Tensor]], Coroutine[None]]
) -> Coroutine[None]:
    """Reduce what the operands hold, each dtype by itself, and put it back."""
    for dtype in dict.fromkeys(operand.flat.dtype for operand in operands):
        yield from reduce(dtype, [operand.flat for operand in operands if operand.flat.dtype is dtype])
    for operand in operands:
        operand.write_back()


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


class ScaledOp(NamedTuple):
    op: AnyOp  # result = postscale * op over ranks of (prescale * tensor)
    prescale: float
    postscale: float


def reduction_of(op: int, prescale_factor: float, postscale_factor: float) -> ScaledOp:
    """What a caller asks for. Raises: UsageError."""
    chosen = op if type(op) is ReduceOp else reduce_op(op)
    try:
        return ScaledOp(chosen, float(prescale_factor), float(postscale_factor))
    except (TypeError, ValueError, RuntimeError):
        given = f"prescale_factor={prescale_factor!r}, postscale_factor={postscale_factor!r}"
        raise WrongTypeError(f"prescale_factor and postscale_factor: expected numbers, got {given}.") from None


@lru_cache(maxsize=256)
def arithmetic_of(dtype: torch.dtype, op: AnyOp, size: int, prescale: float, postscale: float) -> Arithmetic:
    """The arithmetic of a reduction over `size` ranks; kept, as programs repeat few of them. Used in the loop only."""
    divisor = size if op is Average else 1
    return Arithmetic(dtype, op, divisor=divisor, prescale=prescale, postscale=postscale)


def check_adasum(dtype: torch.dtype) -> None:
    """Refuse a dtype that has no Adasum: it is made of dot products of real vectors, which integers round."""
    if not dtype.is_floating_point:
        raise UsageError(
            f"op Adasum is not defined on dtype {dtype_name(dtype)}; expected float16, bfloat16, float32 or float64."
        )


def check_reduction(kind: str, name: str, reduction: ScaledOp, dtypes: list[torch.dtype]) -> None:
    """Refuse a reduction that is not defined on these dtypes, or factors it cannot take."""
    if math.isnan(reduction.prescale) or math.isnan(reduction.postscale):
        raise UsageError(
            f"{kind} {name!r}: expected numbers as factors, got prescale_factor={reduction.prescale}, "
            f"postscale_factor={reduction.postscale}."
        )
    if reduction.op is Adasum and "allreduce" not in kind:
        raise UnsupportedOpError(f"{kind} {name!r}: op Adasum is defined for allreduce alone; use Average or Sum.")
    try:
        for dtype in dict.fromkeys(dtypes):
            if reduction.op is Adasum:
                check_adasum(dtype)
                continue
            arithmetic_of(dtype, reduction.op, 1, reduction.prescale, reduction.postscale)
    except UsageError as error:
        raise UsageError(f"{kind} {name!r} with op {op_name(reduction.op)}: {error}") from None
