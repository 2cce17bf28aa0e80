"""What the tests of ZeroRedundancyOptimizer share: a model, its inputs, and averaging by hand."""

from types import ModuleType

import torch
from torch import Tensor, nn


def net(seed: int = 0) -> nn.Module:
    """A model with large and small parameters, the same wherever the seed is the same."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 900), nn.Tanh(), nn.Linear(900, 20), nn.Tanh(), nn.Linear(20, 3))


def batch(step: int, rows: int = 12) -> Tensor:
    """Inputs of all ranks together."""
    return torch.randn(rows, 20, generator=torch.Generator().manual_seed(500 + step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss on a batch."""
    return model(inputs).square().mean()


def average_gradients(hvd: ModuleType, model: nn.Module) -> None:
    """What DistributedDataParallel would leave."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        hvd.allreduce_(parameter.grad, op=hvd.Average)


def difference(first: nn.Module, second: nn.Module) -> float:
    """The largest absolute difference of two models' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
