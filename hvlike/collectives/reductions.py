"""What a caller says about a reduction, checked and completed: op, deprecated `average`, factors."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch

from hvlike.errors import UsageError
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.ops import ReduceOp, op_name, reduce_op
from hvlike.transport.dtypes import dtype_name

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True)
class Reduction:
    """op and factors: result = postscale * op over ranks of (prescale * tensor)."""

    op: ReduceOp
    prescale: float
    postscale: float


def choose_op(average: bool | None, op: int | None) -> ReduceOp:
    """The reduction from Horovod's two ways to say it; neither: Average.

    Raises: UsageError when both are given or op is none of the constants.
    """
    if average is not None:
        if op is not None:
            raise UsageError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    return Average if op is None else reduce_op(op)


@lru_cache(maxsize=256)
def arithmetic_of(dtype: torch.dtype, op: ReduceOp, size: int, prescale: float, postscale: float) -> Arithmetic:
    """The arithmetic of a reduction over `size` ranks; kept, as programs repeat few of them. Used in the loop only."""
    divisor = size if op is Average else 1
    return Arithmetic(dtype, op, divisor=divisor, prescale=prescale, postscale=postscale)


def check_adasum(dtype: torch.dtype) -> None:
    """Refuse a dtype that has no Adasum: it is made of dot products of real vectors, which integers round."""
    if not dtype.is_floating_point:
        raise UsageError(
            f"op Adasum is not defined on dtype {dtype_name(dtype)}; expected float16, bfloat16, float32 or float64."
        )


def check_reduction(kind: str, name: str, reduction: Reduction, dtypes: list[torch.dtype]) -> None:
    """Refuse a reduction that is not defined on these dtypes, or factors it cannot take."""
    if math.isnan(reduction.prescale) or math.isnan(reduction.postscale):
        raise UsageError(
            f"{kind} {name!r}: expected numbers as factors, got prescale_factor={reduction.prescale}, "
            f"postscale_factor={reduction.postscale}."
        )
    if reduction.op is Adasum and "allreduce" not in kind:
        raise UsageError(f"{kind} {name!r}: op Adasum is defined for allreduce alone; use Average or Sum.")
    try:
        for dtype in dict.fromkeys(dtypes):
            if reduction.op is Adasum:
                check_adasum(dtype)
                continue
            arithmetic_of(dtype, reduction.op, 1, reduction.prescale, reduction.postscale)
    except UsageError as error:
        raise UsageError(f"{kind} {name!r} with op {op_name(reduction.op)}: {error}") from None
