"""Batch normalisation by the statistics of all ranks' batches, and its derivative.

With n[r] values a channel on rank r, their mean m[r] and the squares' sum around it M[r], the whole batch has

    n = sum n[r],  m = sum n[r] m[r] / n,  M = sum M[r] + sum n[r] (m[r] - m)^2

(Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"). M[r] is
taken around the rank's own mean, so no large numbers cancel. Only the spread of the means is left, which float64 holds
for values of up to 32 bits as a difference of sums. float64 values have no wider type: their spread is summed around
the mean itself, once that is known.

With n values a channel over all ranks, x^ = (x - m) / s and y = w x^ + b, and g = dL/dy, L summed over the ranks:

    dL/dx = w / s (g - sum g / n - x^ sum (g x^) / n)      sums over all ranks: one allreduce
    dL/dw = sum (g x^),  dL/db = sum g                      sums over this rank, to be averaged like all gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.collectives.api.allreduce import allreduce_
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Sum
from hvlike.errors import UsageError


class Statistics(NamedTuple):
    """Statistics over all ranks, float64: of shape (C), one of each channel, but for `total`."""

    total: Tensor
    """0-dim: how many values each channel has."""
    mean: Tensor
    squares: Tensor
    """Sum of the squared distances from the mean."""

    def variance(self) -> Tensor:
        """The variance that values are normalised by."""
        return self.squares / self.total

    def unbiased_variance(self) -> Tensor:
        """The variance that running statistics use."""
        return self.squares / (self.total - 1)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit dtypes, else the dtype itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def channel_dimensions(values: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, values.dim())]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """(C) as (1, C, 1, ...), to be used with values of as many dimensions as `like`."""
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


def count_of(values: Tensor) -> int:
    """How many values of each channel there are."""
    return values.numel() // values.shape[1]


def local_sums(values: Tensor) -> Tensor:
    """This rank's part of the sum over ranks, [n, n m, M + n m^2]: (1 + 2C), float64. (N, C, ...) may be empty."""
    count, channels = count_of(values), values.shape[1]
    sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if count:
        exact = values.to(computing_dtype(values.dtype))
        dimensions = channel_dimensions(values)
        mean = exact.mean(dimensions)
        centered = exact - per_channel(mean, exact)
        # The rounding error of the mean: the distances are exactly those from mean + rest.
        rest = centered.mean(dimensions).to(torch.float64)
        mean = mean.to(torch.float64) + rest
        squares = centered.square_().sum(dimensions).to(torch.float64) - count * rest.square()
        sums[0] = count
        sums[1 : 1 + channels] = count * mean
        sums[1 + channels :] = squares + count * mean.square()
    return sums


def combine(sums: Tensor) -> Statistics:
    """The statistics of the whole batch, from the sum of all ranks' `local_sums`."""
    channels = (sums.numel() - 1) // 2
    count = sums[0]
    mean = sums[1 : 1 + channels] / count.clamp(min=1)
    return Statistics(count, mean, (sums[1 + channels :] - count * mean.square()).clamp(min=0))


def squares_around(own: Tensor, mean: Tensor) -> Tensor:
    """This rank's part of M, (C), around the mean of the whole batch."""
    return (own - per_channel(mean, own)).square_().sum(channel_dimensions(own))


def reduce_statistics(values: Tensor, name: str, process_set: ProcessSet | None) -> Statistics:
    """The statistics over all ranks of (N, C, ...): one allreduce, two for float64. Collective; blocks."""
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
        # Copies: views of one tensor would change together when gradients are accumulated.
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
