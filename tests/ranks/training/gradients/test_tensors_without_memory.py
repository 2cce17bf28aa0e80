"""A program may put anything in place of a gradient: what has no memory of its own is refused, and never read."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.without_memory import Wrapper
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from hvlike.errors import UsageError
from hvlike.nn import DistributedDataParallel

MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": Wrapper,
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "functional": torch._to_functional_tensor,
    "zeros": lambda tensor: torch._efficientzerotensor(tuple(tensor.shape)),
}


def train(optimizer: Any, model: nn.Module, exchange: Callable[[Tensor], Tensor] | None = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if exchange is not None:
        first = next(iter(model.parameters()))
        assert first.grad is not None
        first.grad = exchange(first.grad)
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 4], ids=["first", "steady"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_an_exchanged_gradient(hvd: ModuleType, make: Callable[[Tensor], Tensor], steps: int) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing is reduced")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(steps):
        train(optimizer, model)
    before = [each.detach().clone() for each in model.parameters()]
    # Also: the gradient is not that of backward, or the last step was one of this kind.
    with pytest.raises((UsageError, hvd.HorovodInternalError)):
        train(optimizer, model, make)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    optimizer.abandon()
    hvd.barrier()
    model.zero_grad()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_a_hook_of_ddp(hvd: ModuleType) -> None:
    """What a communication hook gets."""
    if hvd.size() == 1:
        pytest.skip("nothing is reduced")
    model = DistributedDataParallel(nn.Linear(4, 3))
    model.register_comm_hook(None, lambda state, bucket: hvd.allreduce_async(bucket.buffer()))
    model.module.weight.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", Wrapper(each.grad)))
    with pytest.raises(UsageError, match="expected a tensor with memory of its own, got a Wrapper"):
        model(torch.ones(2, 4)).sum().backward()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_parameters(hvd: ModuleType, op: str) -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(UsageError, match=r"parameter 'noname\.0\.0': .*got a meta tensor of shape \[3\]"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=getattr(hvd, op))
