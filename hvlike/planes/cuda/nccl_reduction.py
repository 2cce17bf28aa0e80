"""How NCCL does a reduction of ours: which of its ops, on which dtype, and what is multiplied before and after.

    Average of float32            avg
    Sum of bfloat16, factor 0.5   sum, then times 0.5
    Sum of bool (or)              max of bytes
    Average of complex64          avg of the real numbers in it
    Average of int32              nothing: it truncates differently

Pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.ops import ReduceOp
from hvlike.transport.dtypes import Kind

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVERAGE: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "prod",
}
_NO_INTEGERS = (torch.int16,)


class Recipe(NamedTuple):
    """What is done to each tensor."""

    op: str
    """Of NCCL: sum, avg, min, max or prod."""
    before: float
    after: float
    seen_as: torch.dtype | None = None
    """The dtype that NCCL is told; None for the tensor's own."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The flat tensor as NCCL shall see it, without a copy."""
        return tensor if self.seen_as is None else tensor.view(self.seen_as)


def recipe_of(arithmetic: Arithmetic, size: int) -> Recipe | None:
    """How to do it among `size` ranks; None where NCCL cannot, or not with the results that the host gives."""
    op, factors, kind = arithmetic.op, arithmetic.factors, arithmetic.element.kind
    before, after = factors.prescale, factors.postscale
    if kind is Kind.BOOL:
        return Recipe("max" if op in (ReduceOp.SUM, ReduceOp.MAX) else "min", 1.0, 1.0, torch.uint8)
    if kind is Kind.INTEGER:
        plain = before == after == factors.divisor == 1
        name = "sum" if op is ReduceOp.AVERAGE else _NAMES[op]
        return Recipe(name, 1.0, 1.0) if plain and arithmetic.dtype not in _NO_INTEGERS else None
    seen_as = None
    if kind is Kind.COMPLEX:
        if op is ReduceOp.PRODUCT:
            return None
        seen_as = torch.float32 if arithmetic.dtype is torch.complex64 else torch.float64
    if factors.divisor == size and op is ReduceOp.AVERAGE:
        return Recipe("avg", before, after, seen_as)
    name = "sum" if op is ReduceOp.AVERAGE else _NAMES[op]
    return Recipe(name, before, after / factors.divisor, seen_as)
