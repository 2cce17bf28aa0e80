"""What a Join context leaves alone: which frozen layers are still reduced, and the gradients of other models.

The reduction that ends a context once ran for all optimizers of the process set. A ZeroRedundancyOptimizer that reduces
took its part of nothing, zeros, for its gradients.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import make_model, same_on_all_ranks
from support.training.ways import Wrapped
from torch import Tensor, nn

from hvlike.join import Join
from hvlike.nn import DistributedDataParallel

WAYS = ["optimizer", "adasum", "ddp", "find unused", "built-in hook"]


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_frozen_before_a_join_that_one_rank_takes_no_part_in(
    hvd: ModuleType, way: str, before: int, steps: int, set_to_none: bool
) -> None:
    model = make_model()
    wrapped = Wrapped(way, model)

    def step(number: int) -> None:
        wrapped.step(hvd, number, set_to_none=set_to_none)

    for number in range(before):
        step(number)
    model[2].requires_grad_(False)
    rested = model[2].weight.detach().clone()
    with Join(wrapped.joinables):
        for number in range(0 if hvd.rank() == hvd.size() - 1 and hvd.size() > 1 else steps):
            step(10 + number)
    for number in range(3):
        step(20 + number)
    assert torch.equal(model[2].weight, rested)
    model[2].requires_grad_(True)
    for number in range(2):
        step(30 + number)
    assert not torch.equal(model[2].weight, rested)
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_frozen_as_the_last_thing_in_the_body(hvd: ModuleType, way: str) -> None:
    model = make_model()
    wrapped = Wrapped(way, model)
    with Join(wrapped.joinables):
        for number in range(hvd.rank()):
            wrapped.step(hvd, number)
        model[0].requires_grad_(False)
    for number in range(3):
        wrapped.step(hvd, 10 + number)
    assert same_on_all_ranks(model.parameters())


LR = 0.1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize(("way", "wrapper"), [("zero", {}), ("optimizer", {"backward_passes_per_step": 2})])
@pytest.mark.parametrize("uneven", [False, True], ids=["as many inputs", "other numbers of inputs"])
def test_passes_before_and_after_a_join_are_one_step(
    hvd: ModuleType, way: str, wrapper: dict[str, Any], uneven: bool
) -> None:
    model, other = net(), net()
    optimizer = Wrapped(way, model, wrapper=wrapper, lr=LR).optimizer
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
