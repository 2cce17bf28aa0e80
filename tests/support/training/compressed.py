"""Gradients that every rank knows of every other, sent through a compressing optimizer."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvlike.collectives.compression import Compressor
from hvlike.training.distributed_optimizer import DistributedOptimizer


def gradients_of(rank: int, step: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """What a rank's backward pass gives in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Doubles(Compressor):
    """A compressor of a program: sends float64."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return it in float64, and its dtype."""
        return tensor.double(), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return it in the dtype that it had."""
        return tensor.to(ctx)


class Run:
    """An optimizer with a compressor over parameters of the given shapes."""

    def __init__(
        self,
        hvd: ModuleType,
        compression: Any,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.hvd, self.compression, self.shapes, self.dtype = hvd, compression, list(shapes), dtype
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(self.parameters)]
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=0.125, momentum=0.5), named, compression=compression, **options
        )

    def step(self, step: int) -> list[Tensor]:
        """Take one step; the reduced gradients."""
        return self.step_with(gradients_of(self.hvd.rank(), step, self.shapes, self.dtype))

    def step_with(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take one step with these gradients; the reduced ones."""
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.backward(gradient)
        self.optimizer.step()
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]

    def everybody(self, step: int) -> list[list[Tensor]]:
        """The gradients of all ranks in a step."""
        return [gradients_of(rank, step, self.shapes, self.dtype) for rank in range(self.hvd.size())]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of the ranks, in float64."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0)
