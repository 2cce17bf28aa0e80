"""broadcast_optimizer_state gives every rank the root's state and options, and changes nothing else."""

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, whole_batch
from torch import Tensor, nn

from hvlike.collectives.api.objects import allgather_object
from hvlike.errors import MismatchError, UsageError
from hvlike.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from hvlike.training.distributed_optimizer import DistributedOptimizer

NAMES = ["SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"]
NAMES += ["ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: partial(getattr(torch.optim, name), lr=0.01) for name in NAMES
}
OPTIMIZERS["SGD momentum"] = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)
OPTIMIZERS["AdamW amsgrad, decay"] = lambda parameters: torch.optim.AdamW(
    parameters, lr=0.1, weight_decay=0.5, amsgrad=True
)
OPTIMIZERS["AdamW fused"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)
OPTIMIZERS["Adam, rate in a tensor"] = lambda parameters: torch.optim.Adam(
    parameters, lr=torch.tensor(0.01), foreach=False
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, whole_batch(step))
            loss.backward()
            return loss.detach()

        optimizer.step(closure)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def without_tensors(value: Any) -> Any:
    """The same structure with the form of each tensor in its place."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, dict):
        return {key: without_tensors(each) for key, each in value.items()}
    return [without_tensors(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_elsewhere", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_optimizer(hvd: ModuleType, name: str, steps_elsewhere: int, wrapped: bool) -> None:
    root = hvd.size() - 1
    is_root = hvd.rank() == root
    model = make_model(hvd.rank())
    optimizer = OPTIMIZERS[name](model.parameters())
    if not is_root:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[0]["only here"] = 1
    train(model, optimizer, 3 if is_root else steps_elsewhere)
    weights = copy.deepcopy(model.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    broadcast_optimizer_state(DistributedOptimizer(optimizer) if wrapped else optimizer, root)
    state = optimizer.state_dict()
    assert allgather_object(without_tensors(state)) == [without_tensors(state)] * hvd.size()
    assert same_on_all_ranks([torch.zeros(1), *tensors_in(state)])
    if is_root:
        assert without_tensors(state) == without_tensors(before)
        assert all(torch.equal(a, b) for a, b in zip(tensors_in(state), tensors_in(before), strict=True))
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    broadcast_parameters(model.state_dict(), root)
    train(model, optimizer, 2)
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_an_empty_state_stays_empty_and_replaces_others(hvd: ModuleType, name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    if hvd.rank():
        train(model, optimizer, 1)
    broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state_dict()["state"]


def test_dtypes_of_state_are_kept(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[parameter] = {
            "sum": torch.full((3,), 1 / 3, dtype=torch.float64),
            "self": parameter,
            "twice": [torch.ones(1)] * 2,
            "note": ("text", 1),
        }
    broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state[parameter]
    assert state["sum"].dtype is torch.float64
    assert state["sum"].tolist() == [1 / 3] * 3
    assert state["self"] is parameter
    assert state["twice"][0] is state["twice"][1]
    assert state["note"] == ("text", 1)


@pytest.mark.mpi(min_size=2)
def test_different_groups_are_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    parameters = list(make_model().parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}] if hvd.rank() == 1 else [{"params": parameters}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(MismatchError, match=r"do not hold the same as root rank 0. rank 1: 'parameter 2 of group 0'"):
        broadcast_optimizer_state(optimizer, 0)
    other = torch.optim.SGD(parameters, lr=0.1 + hvd.rank())
    broadcast_optimizer_state(other, 0)
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.mpi(min_size=2)
def test_another_class_is_an_error_on_every_rank(hvd: ModuleType) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    sgd, adam = torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters, lr=0.2)
    with pytest.raises(MismatchError, match="rank 1: 'class': expected SGD, got Adam"):
        broadcast_optimizer_state(adam if hvd.rank() == 1 else sgd, root_rank=0)
    assert adam.defaults["lr"] == adam.param_groups[0]["lr"] == 0.2
    # Wrapped or not makes no difference.
    broadcast_optimizer_state(DistributedOptimizer(sgd) if hvd.rank() == 1 else sgd, root_rank=0)


def test_something_that_is_no_optimizer(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"expects a torch.optim.Optimizer, got Sequential"):
        broadcast_optimizer_state(make_model(), 0)
