"""Functions of the user for tests of the local machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SumAndProduct(torch.autograd.Function):
    """Two outputs; what is saved is taken back in backward."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(left, right)
        return left + right, left * right

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor, of_product: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return of_sum + of_product * right, of_sum + of_product * left


class NoneForRight(torch.autograd.Function):
    """Its second input gets no gradient, not even zeros."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left)
        return left.sin() + right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0].cos(), None


class Refuses(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("refused")


_Two = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_One = Callable[[Tensor, Tensor], Tensor]

sum_and_product: _Two = SumAndProduct.apply
none_for_right: _One = NoneForRight.apply
refuse: Callable[[Tensor], Tensor] = Refuses.apply
