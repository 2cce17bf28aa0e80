"""The derivative of allreduce.

y[r] = c * op over s of (p * x[s]) on every rank r, with L = sum over r of L[r](y[r]) and g = sum over r of dL[r]/dy[r]:

    Sum, Average   dL/dx[s] = (factors) g                          an allreduce with the same op and factors
    Min, Max       dL/dx[s] = c p g / ties where p x[s] was chosen, else 0
    Product        dL/dx[s] = c p g * (product over the other ranks of p x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.collectives.reductions import Max, Min, Product, Reduction, Sum

Run = Callable[[Sequence[torch.Tensor], str | None, Reduction], list[torch.Tensor]]


class GroupedAllreduce(torch.autograd.Function):
    """Reduces out of place; `run(tensors, name, reduction)` does it without a gradient."""

    @staticmethod
    def forward(ctx: Any, run: Run, name: str | None, reduction: Reduction, *tensors: torch.Tensor) -> Any:
        """Reduce, and keep what the derivative of this op looks at."""
        outputs = run(tensors, name, reduction)
        ctx.run, ctx.name, ctx.reduction = run, name, reduction
        if reduction.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(
            *(each for each in outputs if not each.is_floating_point() and not each.is_complex())
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Collective like the forward call: all ranks of the set run backward."""
        run: Run = ctx.run
        reduction: Reduction = ctx.reduction
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        if reduction.op not in (Min, Max, Product):
            # Sum and Average are their own adjoints, the factors included; for complex ones the factors are real.
            return (None, None, None, *run(gradients, name, reduction))
        count = len(gradients)
        inputs, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        total = run(gradients, name, Reduction(Sum, 1.0, 1.0))
        scale = reduction.prescale * reduction.postscale
        if reduction.op is Product:
            others = _product_of_others([each * reduction.prescale for each in inputs], name, run)
            return (None, None, None, *(scale * g * rest.conj() for g, rest in zip(total, others, strict=True)))
        chosen = [
            (each * reduction.prescale * reduction.postscale == output).to(gradient.dtype)
            for each, output, gradient in zip(inputs, outputs, total, strict=True)
        ]
        ties = run(chosen, None if name is None else f"{name}.ties", Reduction(Sum, 1.0, 1.0))
        return (
            None,
            None,
            None,
            *(scale * g * mine / tied.clamp(min=1) for g, mine, tied in zip(total, chosen, ties, strict=True)),
        )


def _product_of_others(inputs: Sequence[torch.Tensor], name: str | None, run: Run) -> list[torch.Tensor]:
    """For each element the product over all other ranks, right also where some are zero."""
    is_zero = [each == 0 for each in inputs]
    without_zeros = [torch.where(zero, torch.ones_like(each), each) for each, zero in zip(inputs, is_zero, strict=True)]
    products = run(without_zeros, None if name is None else f"{name}.product", Reduction(Product, 1.0, 1.0))
    zeros = run(
        [zero.to(torch.int32) for zero in is_zero],
        None if name is None else f"{name}.zeros",
        Reduction(Sum, 1.0, 1.0),
    )
    result = []
    for own, zero, product, count in zip(without_zeros, is_zero, products, zeros, strict=True):
        others_with_zeros = count - zero.to(torch.int32)
        result.append(torch.where(others_with_zeros == 0, product / own, torch.zeros_like(product)))
    return result
