"""torch.distributed.checkpoint of wrapped models and optimizers: what was saved comes back, wrapped or not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.training.problem import share, whole_batch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import hvlike
from hvlike.errors import UsageError
from hvlike.integrations.distributed_checkpoint import load, save

pytestmark = pytest.mark.differs_by_ranks(2)


class Model(nn.Module):
    """A frozen parameter, buffers, a name that begins like another, and something that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lin = nn.Linear(6, 8)
        self.lin_norm = nn.BatchNorm1d(8)
        self.out = nn.ModuleDict({"lin": nn.Linear(8, 3)})
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.remark = f"made from {seed}"

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out["lin"](self.lin_norm(self.lin(inputs)).tanh()) * self.scale

    def get_extra_state(self) -> str:
        return self.remark

    def set_extra_state(self, state: str) -> None:
        self.remark = state


Training = tuple[nn.Module, torch.optim.Optimizer]


def plain(model: Model) -> Training:
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data_parallel(model: Model) -> Training:
    return hvlike.nn.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)


def distributed_optimizer(model: Model) -> Training:
    return model, hvlike.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def zero(model: Model) -> Training:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = hvlike.optim.ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
    return hvlike.nn.DistributedDataParallel(model), optimizer


def momentum(model: Model) -> Training:
    """Its state is no tensor until there is momentum, and its groups differ."""
    groups = [{"params": [model.lin.weight], "momentum": 0.9}, {"params": [model.out["lin"].bias], "lr": 0.5}]
    return hvlike.nn.DistributedDataParallel(model, find_unused_parameters=True), torch.optim.SGD(groups, lr=0.1)


def train(training: Training, steps: range) -> None:
    model, optimizer = training
    for step in steps:
        inputs, targets = share(hvlike, whole_batch(step))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    # Buffers may be each rank's own; those of rank 0 are saved.
    hvlike.broadcast_parameters(list(model.buffers()), root_rank=0)


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Iterator[Path]:
    """A folder that all ranks use."""
    yield Path(hvd.broadcast_object(str(tmp_path)))
    hvd.barrier()


def states(training: Training) -> dict[Any, Any]:
    """The state of the model, and of the optimizer by parameter."""
    model, optimizer = training
    return {**getattr(model, "module", model).state_dict(), **optimizer.state_dict()["state"]}


def check_same(training: Training, expected: dict[Any, Any]) -> None:
    found = states(training)
    assert found.pop("_extra_state") == expected.pop("_extra_state")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # A ZeroRedundancyOptimizer has asked the other ranks for their share: they must still have it.
    hvlike.barrier()


@pytest.mark.parametrize("wrapped", [data_parallel, distributed_optimizer, zero, momentum])
def test_training_goes_on_as_if_it_had_not_stopped(
    hvd: ModuleType, folder: Path, wrapped: Callable[[Model], Training]
) -> None:
    first = wrapped(Model(seed=1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(first[1], 0.5)
    train(first, range(2))
    schedule.step()
    save(folder / "a", first[0], first[1], schedule=schedule, epoch=7, notes={"rank": hvd.rank()})
    assert not dist.is_initialized()

    second = wrapped(Model(seed=2))
    other_schedule = torch.optim.lr_scheduler.ExponentialLR(second[1], 0.9)
    values = load(folder / "a", second[0], second[1], schedule=other_schedule)
    assert values == {"epoch": 7, "notes": {"rank": 0}}
    assert other_schedule.gamma == 0.5
    assert getattr(second[0], "module", second[0]).remark == "made from 1"
    check_same(second, states(first))
    for training in (first, second):
        train(training, range(2, 4))
    check_same(second, states(first))


@pytest.mark.parametrize("saved", [data_parallel, zero])
def test_it_does_not_matter_what_model_and_optimizer_were_wrapped_in(
    hvd: ModuleType, folder: Path, saved: Callable[[Model], Training]
) -> None:
    first = saved(Model(seed=1))
    train(first, range(2))
    save(folder / "a", *first)
    for wrapped in (distributed_optimizer, zero):
        model = Model(seed=2)
        if wrapped is distributed_optimizer and saved is zero:
            second = (
                model,
                hvd.DistributedOptimizer(
                    torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
                ),
            )
        elif saved is data_parallel:
            second = plain(model)
        else:
            second = wrapped(model)
        load(folder / "a", *second)
        check_same(second, states(first))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_program_without_hvlike_reads_it(hvd: ModuleType, folder: Path) -> None:
    first = data_parallel(Model(seed=1))
    train(first, range(1))
    save(folder / "a", *first)
    if hvd.rank() == 0:
        model = Model(seed=2)
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        first_moment = torch.zeros(8, 6)
        wanted = {"model": state, "optimizer": {"state": {"lin.weight": {"exp_avg": first_moment}}}}
        dcp.load(wanted, checkpoint_id=folder / "a", no_dist=True)
        for name, value in first[0].module.state_dict().items():
            assert not isinstance(value, Tensor) or torch.equal(state[name], value)
        assert torch.equal(first_moment, first[1].state[first[0].module.lin.weight]["exp_avg"])


def test_what_does_not_fit_is_refused_on_every_rank(hvd: ModuleType, folder: Path) -> None:
    model, optimizer = data_parallel(Model(seed=1))
    with pytest.raises(UsageError, match="no complete checkpoint"):
        load(folder / "a", model)
    save(folder / "a", model)
    with pytest.raises(UsageError, match="holds a checkpoint already"):
        save(folder / "a", model)
    with pytest.raises(UsageError, match="saved without an optimizer"):
        load(folder / "a", model, optimizer)
    with pytest.raises(UsageError, match=r"nothing by the names \['schedule'\]"):
        load(folder / "a", model, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    with pytest.raises(UsageError, match=r"model.weight is not in it; model.lin.bias is not in the model"):
        load(folder / "a", nn.Linear(2, 2, bias=False))
    other = Model(seed=1)
    other.lin = nn.Linear(5, 8)
    with pytest.raises(UsageError, match=r"model.lin.weight has the shape \[8, 6\] there and \[8, 5\] here"):
        load(folder / "a", other)
    with pytest.raises(UsageError, match="are not the model's"):
        save(folder / "b", nn.Linear(2, 2), optimizer)
    assert not (folder / "b").exists()


def test_what_is_damaged_is_an_error_on_every_rank(hvd: ModuleType, folder: Path) -> None:
    model, optimizer = data_parallel(Model(seed=1))
    train((model, optimizer), range(1))
    save(folder / "a", model, optimizer)
    if hvd.rank() == 0:
        for file in (folder / "a").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    hvd.barrier()
    with pytest.raises(CheckpointException):
        load(folder / "a", model, optimizer)
    assert not dist.is_initialized()
    hvd.barrier()
    if hvd.rank() == 0:
        (folder / "a" / ".metadata").write_bytes(b"no metadata")
    with pytest.raises(UsageError, match=r"\.metadata cannot be read"):
        load(folder / "a", model, optimizer)
