"""Mean and variance of a batch that is spread over the ranks. Pure functions.

With n[r] values a channel on rank r, their mean m[r] and the squares' sum around it M[r], the whole batch has

    n = sum n[r],  m = sum n[r] m[r] / n,  M = sum M[r] + sum n[r] (m[r] - m)^2

(Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"). The
difference of large numbers in a sum of squares is not met: M[r] is taken around the rank's own mean, and only the
spread of the means is left, which float64 holds for values of up to 32 bits as a difference of sums. float64 values
have no wider type: their spread is summed around the mean itself, once that is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Of one channel each, over all ranks: float64, (C) but for the count."""

    total: Tensor
    """0-dim: how many values each channel has."""
    mean: Tensor
    squares: Tensor
    """Sum of the squared distances from the mean."""

    def variance(self) -> Tensor:
        """What the values are normalised by."""
        return self.squares / self.total

    def unbiased_variance(self) -> Tensor:
        """What running statistics take up."""
        return self.squares / (self.total - 1)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What 16-bit values are computed in: float32; all others in their own."""
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
    """What this rank adds to the sum over ranks: (1 + 2C) of float64, [n, n m, M + n m^2].

    values: (N, C, ...), also with no element at all: that adds nothing.
    """
    count, channels = count_of(values), values.shape[1]
    sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if count:
        exact = values.to(computing_dtype(values.dtype))
        dimensions = channel_dimensions(values)
        mean = exact.mean(dimensions)
        centered = exact - per_channel(mean, exact)
        # What is left of the mean by rounding it: the distances are then exactly those from mean + rest.
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
    """What this rank adds to M once the mean of the whole batch is known: (C).

    own: this rank's values, (N, C, ...).
    """
    return (own - per_channel(mean, own)).square_().sum(channel_dimensions(own))
