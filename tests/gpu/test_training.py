"""Training on a GPU: as one process on the CPU trains, without the host waiting, whatever the stream."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from gpu.waiting import host_does_not_wait
from torch import Tensor, nn

from hvlike.errors import DeadlockError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.gpu

STEPS = 4
SAMPLES = 24
"""Divisible by 1, 2, 3 and 4 ranks."""

Step = Callable[[Tensor, Tensor], None]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 80), nn.BatchNorm1d(80), nn.Tanh(), nn.Linear(80, 2)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def whole_batch() -> list[Tensor]:
    """The parameters that one process ends with on the CPU."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        train(model, optimizer, *batch(step))
    return [parameter.detach() for parameter in model.parameters()]


def with_optimizer(hvd: ModuleType, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def with_ddp(hvd: ModuleType, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def with_zero(hvd: ModuleType, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return DistributedDataParallel(model), optimizer


KINDS = [with_optimizer, with_ddp, with_zero]


def share(hvd: ModuleType, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    return inputs[hvd.rank() :: hvd.size()].to(device), targets[hvd.rank() :: hvd.size()].to(device)


def distributed(hvd: ModuleType, device: torch.device) -> nn.Module:
    """The model with batch normalisation over all ranks."""
    return hvd.convert_sync_batchnorm(make_model()).to(device)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_process_on_the_cpu(hvd: ModuleType, device: torch.device, kind: Callable) -> None:
    model, optimizer = kind(hvd, distributed(hvd, device))
    for step in range(STEPS):
        train(model, optimizer, *share(hvd, step, device))
    for trained, expected in zip(model.parameters(), whole_batch(), strict=True):
        assert trained.device == device
        torch.testing.assert_close(trained.detach().cpu(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_make_the_host_wait(hvd: ModuleType, device: torch.device, kind: Callable) -> None:
    model, optimizer = kind(hvd, distributed(hvd, device))
    batches = [share(hvd, step, device) for step in range(4)]
    for each in batches[:2]:
        train(model, optimizer, *each)
    with host_does_not_wait():
        for each in batches[2:]:
            train(model, optimizer, *each)


def test_clipping_does_not_make_the_host_wait(hvd: ModuleType, device: torch.device) -> None:
    model = distributed(hvd, device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, reduce_gradients=True)
    inputs, targets = share(hvd, 0, device)
    (model(inputs) - targets).square().mean().backward()
    with host_does_not_wait():
        norm = hvd.clip_grad_norm_(optimizer, 1e-3)
    optimizer.step()
    assert norm.device == device
    assert norm.item() > 1e-3
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    own = sum(float(gradient.square().sum()) for gradient in gradients)
    clipped = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Sum).sqrt()
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_gradients_that_were_made_in_another_stream(hvd: ModuleType, device: torch.device) -> None:
    model, optimizer = with_optimizer(hvd, distributed(hvd, device))
    stream = torch.cuda.Stream(device)
    for step in range(STEPS):
        inputs, targets = share(hvd, step, device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            train(model, optimizer, inputs, targets)
    torch.cuda.current_stream(device).wait_stream(stream)
    for trained, expected in zip(model.parameters(), whole_batch(), strict=True):
        torch.testing.assert_close(trained.detach().cpu(), expected, rtol=1e-3, atol=1e-5)


def test_an_infinity_on_one_rank_skips_the_step_on_all(hvd: ModuleType, device: torch.device) -> None:
    model, optimizer = with_optimizer(hvd, distributed(hvd, device))
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, targets = share(hvd, 0, device)
    loss = (model(inputs) - targets).square().mean()
    if hvd.rank() == hvd.size() - 1:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(map(torch.equal, before, [parameter.detach() for parameter in model.parameters()]))


def test_a_default_device_does_not_matter(hvd: ModuleType, device: torch.device) -> None:
    torch.set_default_device(device)
    try:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        assert hvd.broadcast_object({"x": 1}, root_rank=0) == {"x": 1}
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    finally:
        torch.set_default_device(None)


# -- backward runs in a thread of autograd for each GPU -----------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_backward_pass_that_waits_for_what_nobody_asks_for_is_a_deadlock(
    hvd: ModuleType, device: torch.device
) -> None:
    model, optimizer = with_ddp(hvd, make_model().to(device))
    inputs, targets = (each.to(device) for each in batch(0))
    train(model, optimizer, inputs, targets)
    loss = (model(inputs) - targets).square().mean()
    with pytest.raises(DeadlockError):
        hvd.barrier() if hvd.rank() == 0 else loss.backward()
