"""Where a core is spare, gradients are reduced beside backward, in the background; the result is the same."""

import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

STEPS = 5


@pytest.fixture
def restarted(hvd: ModuleType) -> Iterator[Callable[[str], None]]:
    """Start hvlike anew with overlap switched on or off."""

    def restart(overlap: str) -> None:
        hvd.shutdown()
        os.environ["HVLIKE_OVERLAP"] = overlap
        hvd.init()

    yield restart
    hvd.shutdown()
    os.environ.pop("HVLIKE_OVERLAP", None)
    hvd.init()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))


def train(hvd: ModuleType) -> torch.nn.Module:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(100 * hvd.rank() + step)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model


def test_training_gives_the_same_model_with_and_without(hvd: ModuleType, restarted: Callable[[str], None]) -> None:
    restarted("0")
    without = train(hvd)
    restarted("1")
    beside = train(hvd)
    for one, other in zip(without.parameters(), beside.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(hvd.broadcast(other.detach(), 0), other)


@pytest.mark.mpi(min_size=2)
def test_gradients_are_reduced_before_anybody_asks_for_them(hvd: ModuleType, restarted: Callable[[str], None]) -> None:
    restarted("1")
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
