"""A Join context of one model leaves the gradients alone that another one of the program holds meanwhile.

The reduction that ends the context ran for every optimizer of the process set: a ZeroRedundancyOptimizer that reduces
took its part of nothing, zeros, for its gradients.
"""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from hvlike.join import Join
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

LR = 0.1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def zero(hvd: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, reduce_gradients=True)


def wrapped(hvd: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)


@pytest.mark.parametrize("make", [zero, wrapped])
@pytest.mark.parametrize("uneven", [False, True], ids=["as many inputs", "other numbers of inputs"])
def test_passes_before_and_after_a_join_are_one_step(
    hvd: ModuleType, make: Callable[[ModuleType, nn.Module], torch.optim.Optimizer], uneven: bool
) -> None:
    model, other = net(), net()
    optimizer = make(hvd, model)
    joined = DistributedDataParallel(other)
    inner = torch.optim.SGD(other.parameters(), lr=LR)

    def loss(number: int, rank: int, module: nn.Module) -> Tensor:
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * number + rank))
        return module(inputs).square().sum()

    loss(0, hvd.rank(), model).backward()
    with Join([joined]):
        for number in range(2 + uneven * hvd.rank()):
            inner.zero_grad()
            loss(10 + number, hvd.rank(), joined).backward()
            inner.step()
    loss(1, hvd.rank(), model).backward()
    optimizer.step()

    alone = net()
    for rank in range(hvd.size()):
        ((loss(0, rank, alone) + loss(1, rank, alone)) / hvd.size()).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
