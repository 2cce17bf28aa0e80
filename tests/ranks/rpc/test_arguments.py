"""Arguments and results of calls: every kind of value there and back, through each form of call, always as a copy.

What the pickler makes of every kind of object is in tests/unit/rpc.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from support.rpc.forms import FORMS, asynchronous, referred, synchronous


class Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def give_back(value: Any) -> Any:
    return value


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """What the other worker sees of a tensor."""
    return {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "strides": tensor.stride() if tensor.layout is torch.strided else None,
        "layout": tensor.layout,
        "graded": tensor.requires_grad,
        "leaf": tensor.is_leaf,
        "values": tensor.detach().to_dense().tolist(),
    }


TENSORS = {
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "steps": torch.arange(24, dtype=torch.int16)[::5],
    "bfloat16": torch.arange(4.0).to(torch.bfloat16),
    "leaf": torch.arange(4.0, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "uncoalesced": torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    ),
    "large": torch.arange(2000.0).view(2, 1000).t(),
}


@pytest.fixture(params=["peer", "itself"])
def callee(hvd: ModuleType, peer: int, request: pytest.FixtureRequest) -> int:
    """Another worker, and this one."""
    return peer if request.param == "peer" else int(hvd.rank())


def test_arguments_are_any_sequence_and_those_by_name_may_be_left_out(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        for args in (None, (), [1, "a"], (1, "a"), range(2), "ab"):
            for kwargs in (None, {}, {"x": [1]}):
                assert form(peer, echo, args, kwargs) == (tuple(args or ()), kwargs or {})


def test_tensors_arrive_as_they_are_in_both_directions(rpc: ModuleType, callee: int) -> None:
    for name, form in FORMS.items():
        for kind, tensor in TENSORS.items():
            assert form(callee, describe, (tensor,)) == describe(tensor), (name, kind)
            arrived = form(callee, give_back, (tensor,))
            assert describe(arrived) == describe(tensor), (name, kind)
            if tensor.is_sparse:
                assert arrived.is_coalesced() == tensor.is_coalesced()
                assert torch.equal(arrived._indices(), tensor._indices())


def test_containers_within_containers(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        tensor = torch.arange(3.0)
        sent = {"list": [1, (2, None), {3}], "pair": Pair(4, tensor), "deep": [[[tensor]]], "text": "ü", "bytes": b"\0"}
        arrived = form(peer, give_back, (sent,))
        assert arrived["list"] == sent["list"]
        assert type(arrived["pair"]) is Pair
        assert arrived["pair"].tensor is arrived["deep"][0][0][0]
        assert torch.equal(arrived["pair"].tensor, tensor)
        assert (arrived["text"], arrived["bytes"]) == ("ü", b"\0")


def test_a_result_of_a_graph_arrives_as_a_leaf(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    # On its owner a value is not copied.
    for form in (synchronous, asynchronous) if hvd.size() == 1 else FORMS.values():
        weight = torch.ones(2, requires_grad=True)
        assert form(peer, describe, (weight * 2,))["leaf"]
        arrived = form(peer, torch.mul, (weight, 3))
        assert arrived.requires_grad
        assert arrived.is_leaf
        arrived.sum().backward()
        assert weight.grad is None


def test_tensors_of_any_size(rpc: ModuleType, callee: int) -> None:
    for form in FORMS.values():
        for length in (1, 1023, 1025, 100_000, 1 << 20):
            tensor = torch.arange(length, dtype=torch.int32)
            arrived = form(callee, give_back, (tensor,))
            assert torch.equal(arrived, tensor)
            arrived += 1
            assert int(tensor[0]) == 0


def test_many_tensors_in_one_message(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        tensors = [torch.full((number * 37,), number) for number in range(60)]
        assert all(torch.equal(*pair) for pair in zip(form(peer, give_back, (tensors,)), tensors, strict=True))


def test_tensors_may_change_once_the_future_is_done(rpc: ModuleType, peer: int) -> None:
    tensor = torch.zeros(5000)
    kept = rpc.remote(peer, give_back, (tensor,))
    assert rpc.rpc_async(peer, torch.sum, (tensor,)).wait() == 0
    kept.to_here()
    tensor.fill_(1)
    assert kept.to_here().sum() == 0


KEPT: dict[str, Any] = {}


@pytest.fixture
def kept_values() -> Iterator[dict[str, Any]]:
    """What this worker keeps."""
    KEPT.update(tensor=torch.zeros(3), list=[1])
    yield KEPT
    KEPT.clear()


def kept(name: str) -> Any:
    return KEPT[name]


def is_kept(value: Any, name: str) -> bool:
    return value is KEPT[name]


def change(tensor: torch.Tensor, numbers: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Change the arguments in place and return them."""
    tensor.fill_(1)
    numbers.append(2)
    return tensor, numbers


def test_a_worker_that_calls_itself_copies_arguments_and_results(
    hvd: ModuleType, rpc: ModuleType, kept_values: dict[str, Any]
) -> None:
    me = hvd.rank()
    for form in FORMS.values():
        for length in (3, 100_000):
            tensor, numbers = torch.zeros(length), [1]
            changed, longer = form(me, change, (tensor, numbers))
            assert (changed == 1).all()
            assert longer == [1, 2]
            assert not tensor.any()
            assert numbers == [1]
        for name, value in kept_values.items():
            assert not form(me, is_kept, (value, name))
    for form in (synchronous, asynchronous):
        form(me, kept, ("tensor",)).fill_(5)
        form(me, kept, ("list",)).append(3)
        assert not kept_values["tensor"].any()
        assert kept_values["list"] == [1]
    # A result that is kept on its owner is the object itself.
    assert referred(me, kept, ("list",)) is kept_values["list"]
