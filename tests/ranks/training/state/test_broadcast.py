"""broadcast_parameters and broadcast_optimizer_state give every rank what the root has, and change nothing else."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, whole_batch
from torch import Tensor, nn

from hvlike import DistributedOptimizer, allgather_object, broadcast_optimizer_state, broadcast_parameters
from hvlike.errors import MismatchError, ShapeMismatchError, UsageError

FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "state dict": lambda model: model.state_dict(),
    "dict of parameters": lambda model: dict(model.named_parameters()),
    "list of parameters": lambda model: list(model.parameters()),
    "generator of parameters": lambda model: model.parameters(),
    "list of pairs": lambda model: list(model.named_parameters()),
    "generator of pairs": lambda model: model.named_parameters(),
    "dict with a None": lambda model: {**model.state_dict(), "nothing": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("from_last", [False, True])
def test_every_form(hvd: ModuleType, form: str, from_last: bool) -> None:
    root = hvd.size() - 1 if from_last else 0
    model, expected = make_model(hvd.rank()), make_model(root)
    broadcast_parameters(FORMS[form](model), root)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_buffers_of_all_dtypes_and_layouts(hvd: ModuleType) -> None:
    rank = hvd.rank()
    tensors = OrderedDict(
        flag=torch.tensor([rank == 0, True]),
        half=torch.full((3,), rank, dtype=torch.bfloat16),
        count=torch.tensor(rank),
        small=torch.full((2, 2), rank, dtype=torch.int8),
        complex=torch.full((2,), rank * 1j, dtype=torch.complex64),
        transposed=torch.full((3, 4), float(rank)).t(),
        channels_last=torch.full((1, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last),
        part=torch.full((4, 4), float(rank))[:, ::2],
        empty=torch.empty(0, 3),
    )
    strides = [tensor.stride() for tensor in tensors.values()]
    broadcast_parameters(tensors, 0)
    assert [tensor.stride() for tensor in tensors.values()] == strides
    assert tensors["flag"].tolist() == [True, True]
    assert all(not tensor.to(torch.complex64).any() for name, tensor in tensors.items() if name != "flag")


def test_batch_norm_statistics(hvd: ModuleType) -> None:
    model = nn.BatchNorm1d(3)
    model(torch.randn(4 + hvd.rank(), 3) + hvd.rank())
    broadcast_parameters(model.state_dict(), 0)
    assert same_on_all_ranks(model.state_dict().values())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("different", "text"),
    [
        ({"b": torch.zeros(3)}, r"rank \d: 'b': expected shape \[2\] float32, got shape \[3\] float32"),
        ({"b": torch.zeros(2, dtype=torch.float64)}, r"'b': expected shape \[2\] float32, got shape \[2\] float64"),
        ({}, r"rank \d: 'b' is missing"),
        ({"b": torch.zeros(2), "c": torch.zeros(2)}, r"'c' exists only here"),
    ],
)
def test_disagreement_is_an_error_on_every_rank_and_changes_nothing(
    hvd: ModuleType, different: dict[str, torch.Tensor], text: str
) -> None:
    other = hvd.rank() == hvd.size() - 1
    tensors = {"a": torch.full((2,), float(hvd.rank())), **(different if other else {"b": torch.zeros(2)})}
    with pytest.raises(ShapeMismatchError, match=f"do not hold the same as root rank 0. .*{text}"):
        broadcast_parameters(tensors, 0)
    assert tensors["a"].tolist() == [hvd.rank()] * 2
    broadcast_parameters([tensors["a"]], 0)
    assert tensors["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (nn.Linear(2, 2), r"got a module. Pass model.state_dict\(\)"),
        (torch.zeros(2), "invalid params of type: Tensor"),
        (3, "invalid params of type: int"),
        ({"epoch": 3}, r"the value of 'epoch' is not a tensor but of type int.*hvlike.broadcast_object"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "the name 'a' occurs twice"),
    ],
)
def test_refused(hvd: ModuleType, given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        broadcast_parameters(given, 0)


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


@pytest.mark.in_turn(17)
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
