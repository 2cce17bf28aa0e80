"""The normalisation by statistics of all ranks, and its derivative.

With n values a channel over all ranks, x^ = (x - m) / s and y = w x^ + b, and g = dL/dy, L summed over the ranks:

    dL/dx = w / s (g - sum g / n - x^ sum (g x^) / n)      sums over all ranks: one allreduce
    dL/dw = sum (g x^),  dL/db = sum g                      sums over this rank: whoever averages gradients adds them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvlike.collectives.allreduce import allreduce_
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Sum
from hvlike.errors import UsageError
from hvlike.training.batch_statistics import (
    Statistics,
    channel_dimensions,
    combine,
    computing_dtype,
    local_sums,
    per_channel,
    squares_around,
)


def reduce_statistics(values: Tensor, name: str, process_set: ProcessSet | None) -> Statistics:
    """The statistics over all ranks of (N, C, ...); one allreduce, two for float64.

    Collective over the process set; blocks.
    """
    values = values.detach()
    sums = allreduce_(local_sums(values), name=f"{name}.forward", op=Sum, process_set=process_set)
    statistics = combine(sums)
    if values.dtype is torch.float64:
        squares = squares_around(values, statistics.mean)
        squares = allreduce_(squares, name=f"{name}.forward.squares", op=Sum, process_set=process_set)
        statistics = statistics._replace(squares=squares)
    return statistics


class Normalization(torch.autograd.Function):
    """Normalises by given statistics, which are a function of the values of all ranks. No second derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        name: str,
        process_set: ProcessSet | None,
    ) -> Tensor:
        """Local: the statistics are known."""
        dtype = computing_dtype(values.dtype)
        mean = statistics.mean.to(dtype)
        inverse = torch.rsqrt(statistics.variance() + eps).to(dtype)
        scale = inverse if weight is None else inverse * weight.to(dtype)
        result = (values.to(dtype) - per_channel(mean, values)).mul_(per_channel(scale, values))
        if bias is not None:
            result += per_channel(bias.to(dtype), values)
        ctx.save_for_backward(values, weight, bias, mean, inverse, statistics.total)
        ctx.name, ctx.process_set = name, process_set
        return result.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Collective like the forward pass, unless the values need no gradient."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"{ctx.name} has no second derivative: run backward without create_graph, or use a layer of local "
                "statistics (torch.nn.BatchNorm1d, 2d, 3d) here."
            )
        values, weight, bias, mean, inverse, count = ctx.saved_tensors
        dtype, dimensions = mean.dtype, channel_dimensions(values)
        incoming = gradients[0].to(dtype)
        normalized = (values.to(dtype) - per_channel(mean, values)).mul_(per_channel(inverse, values))
        sums = torch.stack([incoming.sum(dimensions), (incoming * normalized).sum(dimensions)])
        # Memory of its own for each: what is a view of the other's changes with it when gradients are summed up.
        to_bias, to_weight = (part.clone() for part in sums)
        to_values = None
        if ctx.needs_input_grad[0]:
            allreduce_(sums, name=f"{ctx.name}.backward", op=Sum, process_set=ctx.process_set)
            mean_incoming, mean_product = sums / count.clamp(min=1).to(dtype)
            scale = inverse if weight is None else inverse * weight.to(dtype)
            to_values = incoming - per_channel(mean_incoming, values)
            to_values -= normalized.mul_(per_channel(mean_product, values))
            to_values = to_values.mul_(per_channel(scale, values)).to(values.dtype)
        return (
            to_values,
            to_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            to_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


normalize: Callable[..., Tensor] = Normalization.apply
