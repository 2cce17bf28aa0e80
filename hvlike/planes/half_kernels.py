"""Element-wise kernels for the 16-bit floats, by torch: in float32 and rounded once, or in place with the same bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from hvlike.planes.kernels import Factors, Kernel
from hvlike.planes.ops import ReduceOp
from hvlike.planes.scratch import SCRATCH, ordinary_tensor
from hvlike.transport.dtypes import Array, Element


class HalfKernel(Kernel[torch.Tensor]):
    """float16 and bfloat16: everything is computed in float32 and rounded once, by torch."""

    reductions: ClassVar[dict[ReduceOp, Callable[..., Any]]] = {
        ReduceOp.AVERAGE: torch.add,
        ReduceOp.SUM: torch.add,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
    }

    def __init__(self, element: Element, op: ReduceOp, factors: Factors) -> None:
        super().__init__(element, op, factors)
        self._reduce = self.reductions[op]

    def over(self, buffer: Array) -> torch.Tensor:
        return ordinary_tensor(buffer, self.element.dtype)

    def accumulator(self, length: int) -> torch.Tensor | None:
        return ordinary_tensor(np.empty(length, np.float32), torch.float32)

    def load(self, own: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
        wide = SCRATCH.wide("accumulator", len(own)) if accumulator is None else accumulator[: len(own)]
        return self._widen(own, wide)

    def fold(self, accumulator: torch.Tensor, other: torch.Tensor) -> None:
        wide = self._widen(other, SCRATCH.wide("contribution", len(other)))
        self._reduce(accumulator, wide, out=accumulator)

    def finish(self, accumulator: torch.Tensor) -> None:
        if self.factors.post != 1:
            accumulator.mul_(self.factors.post)

    def store(self, accumulator: torch.Tensor, own: torch.Tensor) -> None:
        own.copy_(accumulator)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def _widen(self, narrow: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        wide.copy_(narrow)
        if self.factors.prescale != 1:
            wide.mul_(self.factors.prescale)
        return wide


class DirectHalfKernel(HalfKernel):
    """float16 and bfloat16 in place, at half the cost: where that gives the same bits, see `direct_contributions`."""

    def accumulator(self, length: int) -> None:
        return None

    def load(self, own: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
        return own

    def fold(self, accumulator: torch.Tensor, other: torch.Tensor) -> None:
        self._reduce(accumulator, other, out=accumulator)

    def store(self, accumulator: torch.Tensor, own: torch.Tensor) -> None:
        pass  # the accumulator is the own piece


def direct_contributions(dtype: torch.dtype, op: ReduceOp, factors: Factors) -> int:
    """Return how many 16-bit contributions besides the own one can be reduced in place with the same result.

    torch computes each 16-bit operation in float32 and rounds. A minimum needs no rounding, a sum of two has one
    in either way; a factor is a second one unless it is a power of two. float16 could overflow before it.
    """
    if factors.prescale != 1:
        return -1
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return sys.maxsize
    exact = factors.post == 1 or (dtype is torch.bfloat16 and abs(math.frexp(factors.post)[0]) == 0.5)
    return 1 if exact else 0
