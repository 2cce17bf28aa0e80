"""Warnings, checksums and reports look at whatever a program holds: they never raise, and change nothing."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.strange_values import STRANGE, strange_options, strange_tensors
from support.without_memory import Wrapper
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD

from hvlike.errors import UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer


class Net(nn.Module):
    """A layer beside a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("kept", buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def as_it_was(before: Tensor, now: Tensor, version: int) -> bool:
    return before is now and (now.is_inference() or now._version == version)


@pytest.mark.parametrize("kind", STRANGE)
def test_buffers_that_are_left_to_each_rank(hvd: ModuleType, kind: str) -> None:
    buffer = strange_tensors()[kind]
    version = buffer._version
    for options in ({}, {"init_sync": False}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(Net(buffer), broadcast_buffers=False, **options)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
        assert as_it_was(buffer, model.module.kept, version)
        assert same_on_all_ranks(model.parameters())


def test_an_adjacency_matrix_is_used(hvd: ModuleType) -> None:
    net = Net(torch.eye(4).to_sparse())
    model = DistributedDataParallel(net, broadcast_buffers=False)
    torch.sparse.mm(net.kept, model(torch.ones(4, 3))).sum().backward()
    assert net.layer.weight.grad is not None


@pytest.mark.parametrize("where", ["first step", "later"])
def test_options_of_an_optimizer(hvd: ModuleType, where: str) -> None:
    for make in (
        lambda parameters: hvd.DistributedOptimizer(SGD(parameters, lr=0.1)),
        lambda parameters: hvd.DistributedOptimizer(SGD(parameters, lr=0.1), op=hvd.Adasum),
        lambda parameters: ZeroRedundancyOptimizer(parameters, SGD, lr=0.1, reduce_gradients=True),
    ):
        net = Net(torch.ones(1))
        optimizer: Any = make(net.parameters())
        options = strange_options()
        if where == "first step":
            optimizer.param_groups[0].update(options)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0].update(options)
        assert all(optimizer.param_groups[0][name] is value for name, value in options.items())
        assert same_on_all_ranks(net.parameters())


def test_a_learning_rate_that_only_its_type_can_tell(hvd: ModuleType) -> None:
    """Of numpy on one rank, plain on the others: the same, so nothing is said."""
    net = Net(torch.ones(1))
    rate = np.float64(0.1) if hvd.rank() == 0 else 0.1
    optimizer = hvd.DistributedOptimizer(SGD(net.parameters(), lr=rate))
    for _ in range(2):
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(net.parameters())


def test_a_timeline_of_numbers_of_numpy(hvd: ModuleType, tmp_path: Path) -> None:
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    try:
        hvd.broadcast(torch.ones(2), np.int64(0), name="with \ud800 in it")
        hvd.allreduce(torch.ones(2), name="ordinary", prescale_factor=np.float32(1.0))
    finally:
        hvd.stop_timeline()


@pytest.mark.parametrize("kind", STRANGE)
def test_progress(hvd: ModuleType, kind: str) -> None:
    bar = hvd.progress(range(2), disable=False, desc=f"strange {kind}")
    with bar:
        value = strange_tensors()[kind]
        with (
            nullcontext()
            if kind == "scalar"
            else pytest.raises(UsageError, match="progress: loss is a tensor of shape")
        ):
            bar.set_metrics(loss=value)
        bar.set_metrics(good=np.float32(1.0), better=torch.ones(1, requires_grad=True))
    assert bar.metrics["good"] == 1.0


def test_progress_over_what_has_no_length(hvd: ModuleType) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    assert len(list(hvd.progress(loader, disable=False))) == 3


def test_statistics(hvd: ModuleType) -> None:
    assert str(hvd.statistics())


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": Wrapper,
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "functional": torch._to_functional_tensor,
    "zeros": lambda tensor: torch._efficientzerotensor(tuple(tensor.shape)),
}


def train_with(optimizer: Any, model: nn.Module, exchange: Callable[[Tensor], Tensor] | None = None) -> None:
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
        train_with(optimizer, model)
    before = [each.detach().clone() for each in model.parameters()]
    # Also: the gradient is not that of backward, or the last step was one of this kind.
    with pytest.raises((UsageError, hvd.HorovodInternalError)):
        train_with(optimizer, model, make)
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
