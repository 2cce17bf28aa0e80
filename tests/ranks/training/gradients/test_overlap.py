"""Where a core is spare, gradients are reduced beside backward, in the background, before anybody asks for them."""

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.differs_by_overlap


@pytest.mark.mpi(min_size=2)
def test_gradients_are_reduced_before_anybody_asks(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]
) -> None:
    restarted({"HVLIKE_OVERLAP": "1"})
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    scale = torch.full((100,), float(hvd.rank()))
    mean = (hvd.size() - 1) / 2
    for step in range(3):
        optimizer.zero_grad()
        (parameter * scale).sum().backward()
        if step > 0:  # the plan is made by the first step
            until = time.monotonic() + 30.0
            while time.monotonic() < until and not bool((parameter.grad == mean).all()):
                time.sleep(0.01)
            assert torch.equal(parameter.grad, torch.full((100,), mean))
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((100,), -3 * mean))


PATIENCE_SECONDS = 30.0


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
def test_a_bucket_is_reduced_before_backward_reaches_the_next(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]
) -> None:
    """Backward is held up in its middle until the first bucket is seen to be done."""
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "4"})
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
