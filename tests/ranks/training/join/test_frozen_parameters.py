"""What a rank has missed in a Join context does not part it from the others: which frozen layers are still reduced."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

import hvlike
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel, allreduce_hook

WAYS = ["optimizer", "adasum", "ddp", "ddp with unused", "ddp with a hook"]


def wrapped(way: str, model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """The module, the optimizer, and which of them is the joinable."""
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    if not way.startswith("ddp"):
        op = hvlike.Adasum if way == "adasum" else hvlike.Average
        optimizer = hvlike.DistributedOptimizer(plain, model.named_parameters(), op=op)
        return model, optimizer, optimizer
    module = DistributedDataParallel(model, find_unused_parameters=way == "ddp with unused")
    if way == "ddp with a hook":
        module.register_comm_hook(None, allreduce_hook)
    return module, plain, module


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_frozen_before_a_join_that_one_rank_takes_no_part_in(
    hvd: ModuleType, way: str, before: int, steps: int, set_to_none: bool
) -> None:
    model = make_model()
    module, optimizer, joinable = wrapped(way, model)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(module, share(hvd, whole_batch(number))).backward()
        optimizer.step()

    for number in range(before):
        step(number)
    model[2].requires_grad_(False)
    rested = model[2].weight.detach().clone()
    with Join([joinable]):
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
    module, optimizer, joinable = wrapped(way, model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(module, share(hvd, whole_batch(number))).backward()
        optimizer.step()

    with Join([joinable]):
        for number in range(hvd.rank()):
            step(number)
        model[0].requires_grad_(False)
    for number in range(3):
        step(10 + number)
    assert same_on_all_ranks(model.parameters())
