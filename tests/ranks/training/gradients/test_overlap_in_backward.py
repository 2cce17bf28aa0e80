"""Buckets are reduced while backward goes on: it is held up in its middle until the first bucket is seen to be done."""

import os
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

PATIENCE_SECONDS = 30.0


@pytest.fixture
def overlapping(hvd: ModuleType) -> Iterator[None]:
    """hvlike started anew, to reduce beside backward in buckets of one tensor."""
    knobs = {"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "4"}
    hvd.shutdown()
    os.environ.update(knobs)
    hvd.init()
    yield
    hvd.shutdown()
    for name in knobs:
        del os.environ[name]
    hvd.init()


class Held(nn.Module):
    """Two scales after each other; between their gradients backward waits for the reduction of the later one's."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.early, self.late = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
        self.mean = mean
        self.holds = False
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.early * x
        if self.holds:
            tensor: Any = between
            tensor.register_hook(self.hold)
        return between * self.late

    def hold(self, gradient: torch.Tensor) -> None:
        """Backward has been through `late` and not yet through `early`."""
        assert self.early.grad is None
        until = time.monotonic() + PATIENCE_SECONDS
        while not self._is_reduced() and time.monotonic() < until:
            time.sleep(0.002)
        self.seen.append(self._is_reduced())

    def _is_reduced(self) -> bool:
        return self.late.grad is not None and bool((self.late.grad == self.mean).all())


@pytest.mark.mpi(min_size=2)
def test_a_bucket_is_reduced_before_backward_reaches_the_next(hvd: ModuleType, overlapping: None) -> None:
    mean = (hvd.size() + 1) / 2
    model = Held(mean)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    x = torch.full((50,), float(hvd.rank() + 1))
    for step in range(4):
        model.holds = step > 0  # the first step makes the plan and reduces nothing early
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert model.early.grad is not None
        assert torch.equal(model.early.grad, torch.full((50,), mean))
    assert model.seen == [True] * 3
