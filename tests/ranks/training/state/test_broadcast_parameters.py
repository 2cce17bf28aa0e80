"""broadcast_parameters makes all ranks equal to the root, whatever form the tensors are given in."""

from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import make_model, same_on_all_ranks
from torch import nn

from hvlike.errors import ShapeMismatchError, UsageError
from hvlike.training.broadcast import broadcast_parameters

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
