"""Batch normalisation over the batches of all simulated ranks, by its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from support.fuzz.oracle import SimulatedWorld


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks, and its derivative: losses are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: SimulatedWorld) -> Tensor:
        ctx.world = world
        return torch.stack(world.gather(tensor.detach().clone())).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.stack(ctx.world.gather(gradient.clone())).sum(0), None


class ReferenceSyncNorm(nn.Module):
    """Takes the place of a BatchNorm1d, and keeps its parameters and buffers."""

    def __init__(self, norm: nn.BatchNorm1d, world: SimulatedWorld) -> None:
        super().__init__()
        self.world = world
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise (N, C)."""
        if not self.training:
            return functional.batch_norm(rows, self.running_mean, self.running_var, self.weight, self.bias)
        count = len(rows) * self.world.size
        mean = SumOverRanks.apply(rows.sum(0), self.world) / count
        centered = rows - mean
        variance = SumOverRanks.apply(centered.square().sum(0), self.world) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        return centered / (variance + 1e-5).sqrt() * self.weight + self.bias
