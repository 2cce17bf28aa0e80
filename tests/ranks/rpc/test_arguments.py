"""Arguments and results of calls: every kind of value there and back, through each form of call."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

Call = Callable[..., Any]


class Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


class Block(torch.nn.Module):
    """One parameter under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def give_back(*args: Any) -> Any:
    return args[0] if len(args) == 1 else args


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


def look_up(table: dict[torch.Tensor, str], key: torch.Tensor) -> str:
    return table[key]


def relations(first: torch.Tensor, others: list[torch.Tensor]) -> list[tuple[bool, bool]]:
    """Of each: is it the first one, does it share its memory."""
    memory = first.untyped_storage().data_ptr()
    return [(other is first, other.untyped_storage().data_ptr() == memory) for other in others]


def make_block() -> Block:
    block = Block()
    # Not by the seed: the main thread and a thread that serves would draw from one generator.
    for parameter in block.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return block


def run_block(block: Block, x: torch.Tensor) -> torch.Tensor:
    assert block.first.weight is block.second.weight
    result: torch.Tensor = block(x)
    return result


TENSORS = {
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "steps": torch.arange(24, dtype=torch.int16)[::5],
    "expanded": torch.arange(3.0).expand(2, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(4.0).to(torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "leaf": torch.arange(4.0, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "constant parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "sparse integers": torch.diag(torch.arange(3)).to_sparse(),
    "uncoalesced": torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    ),
    "large": torch.arange(2000.0).view(2, 1000).t(),
}


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def calls(rpc: ModuleType, peer: int) -> dict[str, Call]:
    """The forms of call: each runs a function on the peer and returns the result."""
    return {
        "sync": lambda func, *args: rpc.rpc_sync(peer, func, args),
        "async": lambda func, *args: rpc.rpc_async(peer, func, args).wait(),
        "remote": lambda func, *args: rpc.remote(peer, func, args).to_here(),
    }


def test_arguments_are_any_sequence(rpc: ModuleType, peer: int) -> None:
    for args in (None, (), [1, "a"], (1, "a"), range(2), "ab"):
        expected = (tuple(args or ()), {"x": 1})
        assert rpc.rpc_sync(peer, echo, args, {"x": 1}) == expected
        assert rpc.rpc_async(peer, echo, args, {"x": 1}).wait() == expected
        assert rpc.remote(peer, echo, args, {"x": 1}).to_here() == expected


def test_arguments_by_name_may_be_left_out(rpc: ModuleType, peer: int) -> None:
    for kwargs in (None, {}, {"x": [1]}):
        assert rpc.rpc_sync(peer, echo, kwargs=kwargs) == ((), kwargs or {})
        assert rpc.rpc_async(peer, echo, (1, 2), kwargs).wait() == ((1, 2), kwargs or {})
        assert rpc.remote(peer, echo, (1, 2), kwargs).to_here() == ((1, 2), kwargs or {})


def test_containers_within_containers(calls: dict[str, Call]) -> None:
    for call in calls.values():
        tensor = torch.arange(3.0)
        sent = {"list": [1, (2, None), {3}], "pair": Pair(4, tensor), "deep": [[[tensor]]], "text": "ü", "bytes": b"\0"}
        arrived = call(give_back, sent)
        assert arrived["list"] == sent["list"]
        assert type(arrived["pair"]) is Pair
        assert arrived["pair"].tensor is arrived["deep"][0][0][0]
        assert torch.equal(arrived["pair"].tensor, tensor)
        assert (arrived["text"], arrived["bytes"]) == ("ü", b"\0")


def test_tensors_are_keys(calls: dict[str, Call]) -> None:
    for call in calls.values():
        key = torch.ones(2)
        assert call(look_up, {key: "found"}, key) == "found"
        table, other = call(give_back, {key: "found"}, key)
        assert table[other] == "found"


def test_one_tensor_twice_and_views_of_one_storage(calls: dict[str, Call]) -> None:
    for call in calls.values():
        base = torch.zeros(4, 4)
        others = [base, base[1], base.t(), base.clone()]
        expected = [(True, True), (False, True), (False, True), (False, False)]
        assert call(relations, base, others) == expected
        first, arrived = call(give_back, base, others)
        assert relations(first, arrived) == expected
        arrived[1].fill_(1)
        assert first.sum() == 4


def test_tensors_arrive_as_they_are_in_both_directions(calls: dict[str, Call]) -> None:
    for form, call in calls.items():
        for name, tensor in TENSORS.items():
            assert call(describe, tensor) == describe(tensor), (form, name)
            arrived = call(give_back, tensor)
            assert describe(arrived) == describe(tensor), (form, name)
            if tensor.is_sparse:
                assert arrived.is_coalesced() == tensor.is_coalesced()
                assert torch.equal(arrived._indices(), tensor._indices())


def test_a_result_of_a_graph_arrives_as_a_leaf(hvd: ModuleType, calls: dict[str, Call]) -> None:
    if hvd.size() == 1:
        # On its owner a value is not copied.
        del calls["remote"]
    for call in calls.values():
        weight = torch.ones(2, requires_grad=True)
        assert call(describe, weight * 2)["leaf"]
        arrived = call(torch.mul, weight, 3)
        assert arrived.requires_grad
        assert arrived.is_leaf
        arrived.sum().backward()
        assert weight.grad is None


def test_modules_are_arguments_and_results(calls: dict[str, Call]) -> None:
    for call in calls.values():
        x = torch.arange(3.0)
        mine = make_block()
        assert torch.equal(call(run_block, mine, x), mine(x))
        theirs = call(make_block)
        assert type(theirs) is Block
        assert theirs.first.weight is theirs.second.weight
        assert type(theirs.first.weight) is torch.nn.Parameter
        assert torch.equal(theirs(x), mine(x))


def test_packed_sequences_and_arrays(calls: dict[str, Call]) -> None:
    for call in calls.values():
        sequence, array = pack_sequence([torch.arange(3.0), torch.arange(2.0)]), np.arange(2000.0).reshape(2, 1000)
        arrived, numbers = call(give_back, sequence, array)
        assert type(arrived) is type(sequence)
        assert torch.equal(arrived.data, sequence.data)
        assert np.array_equal(numbers, array)


def test_tensors_of_any_size(calls: dict[str, Call]) -> None:
    for call in calls.values():
        for length in (1, 1023, 1025, 100_000, 1 << 20):
            tensor = torch.arange(length, dtype=torch.int32)
            arrived = call(give_back, tensor)
            assert torch.equal(arrived, tensor)
            arrived += 1
            assert int(tensor[0]) == 0


def test_many_tensors_in_one_message(calls: dict[str, Call]) -> None:
    for call in calls.values():
        tensors = [torch.full((number * 37,), number) for number in range(60)]
        assert all(torch.equal(*pair) for pair in zip(call(give_back, tensors), tensors, strict=True))


def test_tensors_may_change_once_the_future_is_done(rpc: ModuleType, peer: int) -> None:
    tensor = torch.zeros(5000)
    kept = rpc.remote(peer, give_back, (tensor,))
    assert rpc.rpc_async(peer, torch.sum, (tensor,)).wait() == 0
    kept.to_here()
    tensor.fill_(1)
    assert kept.to_here().sum() == 0
