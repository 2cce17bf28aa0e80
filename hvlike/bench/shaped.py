"""A network of given parameter shapes whose gradients cost one elementwise operation each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvlike.bench.shapes import Shape


class Shaped(nn.Module):
    """Parameters of given shapes; the loss is the sum of their inner products with the batch.

    Forward reads each parameter once, backward writes each gradient once: nearly nothing to hide communication behind,
    and the last parameter's gradient comes first, as in a real network.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    @staticmethod
    def longest(shapes: Sequence[Shape]) -> int:
        """Number of elements that a batch needs."""
        return max(math.prod(shape) for shape in shapes)

    def forward(self, values: Tensor) -> Tensor:
        """values: (longest,). Returns the loss, a scalar."""
        loss = torch.zeros(())
        for weight in self.weights:
            loss = loss + torch.dot(weight.flatten(), values[: weight.numel()])
        return loss
