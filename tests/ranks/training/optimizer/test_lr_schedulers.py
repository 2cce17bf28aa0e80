"""Learning rate schedulers take a DistributedOptimizer for what it is."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch.optim import lr_scheduler

from hvlike import DistributedOptimizer

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("given", ["wrapper", "wrapped"])
def test_rates_follow_the_schedule(hvd: ModuleType, name: str, given: str) -> None:
    def rates(distributed: bool) -> list[float]:
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if not distributed:
            optimizer, scheduler = plain, SCHEDULERS[name](plain)
        elif given == "wrapper":
            optimizer = DistributedOptimizer(plain)
            scheduler = SCHEDULERS[name](optimizer)
        else:
            scheduler = SCHEDULERS[name](plain)
            optimizer = DistributedOptimizer(plain)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(step))).backward()
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        assert not distributed or same_on_all_ranks(model.parameters())
        return seen

    assert rates(True) == rates(False)
