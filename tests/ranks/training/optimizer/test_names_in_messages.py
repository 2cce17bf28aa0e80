"""What messages, statistics and timelines call an optimizer: its class, what it wraps, and a number if need be."""

from types import ModuleType

import pytest
import torch
from torch import nn


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_told_by_what_it_wraps(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    generator, critic, third = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)
    before = set(hvd.statistics().waits)
    for model, kind, names in (
        (generator, torch.optim.Adamax, [("generator.weight", generator.weight), ("generator.bias", generator.bias)]),
        (critic, torch.optim.Adamax, [("critic.weight", critic.weight), ("critic.bias", critic.bias)]),
        (third, torch.optim.Rprop, None),
        (third, torch.optim.Rprop, None),
    ):
        step(hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), named_parameters=names), model)
    found = set(hvd.statistics().waits) - before
    assert {
        "DistributedOptimizer(Adamax, generator.weight)",
        "DistributedOptimizer(Adamax, critic.weight)",
        "DistributedOptimizer(Rprop)",
        "DistributedOptimizer(Rprop) #2",
    } <= found
