"""Tensors without memory of their own are refused on the rank that passes one, before anything is sent.

Their addresses were read once, which ended the job by SIGSEGV.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.without_memory import IN_PLACE, KINDS, Named, Use
from torch import Tensor

from hvlike.errors import HorovodInternalError, UsageError

Call = Callable[[ModuleType, Tensor], Any]
CALLS: dict[str, Call] = {
    "allreduce": lambda hvd, tensor: hvd.allreduce(tensor),
    "named": lambda hvd, tensor: hvd.allreduce(tensor, name="loss"),
    "compressed": lambda hvd, tensor: hvd.allreduce(tensor, compression=hvd.Compression.fp16),
    "allreduce_async": lambda hvd, tensor: hvd.allreduce_async(tensor),
    "grouped_allreduce": lambda hvd, tensor: hvd.grouped_allreduce([torch.ones(2), tensor]),
    "grouped, compressed": lambda hvd, tensor: hvd.grouped_allreduce([tensor], compression=hvd.Compression.fp16),
    "grouped_allreduce_async": lambda hvd, tensor: hvd.grouped_allreduce_async([tensor]),
    "broadcast": lambda hvd, tensor: hvd.broadcast(tensor, 0),
    "broadcast_async": lambda hvd, tensor: hvd.broadcast_async(tensor, 0),
}
WRITING: dict[str, Call] = {
    "allreduce_": lambda hvd, tensor: hvd.allreduce_(tensor),
    "allreduce_async_": lambda hvd, tensor: hvd.allreduce_async_(tensor),
    "grouped_allreduce_": lambda hvd, tensor: hvd.grouped_allreduce_([torch.ones(2), tensor]),
    "grouped_allreduce_async_": lambda hvd, tensor: hvd.grouped_allreduce_async_([tensor]),
    "broadcast_": lambda hvd, tensor: hvd.broadcast_(tensor, 0),
    "broadcast_async_": lambda hvd, tensor: hvd.broadcast_async_(tensor, 0),
    "allgather": lambda hvd, tensor: hvd.allgather(tensor),
    "allgather_async": lambda hvd, tensor: hvd.allgather_async(tensor),
    "grouped_allgather": lambda hvd, tensor: hvd.grouped_allgather([tensor]),
    "grouped_allgather_async": lambda hvd, tensor: hvd.grouped_allgather_async([torch.ones(2), tensor]),
    "alltoall": lambda hvd, tensor: hvd.alltoall(tensor),
    "alltoall_async": lambda hvd, tensor: hvd.alltoall_async(tensor),
    "reducescatter": lambda hvd, tensor: hvd.reducescatter(tensor),
    "reducescatter_async": lambda hvd, tensor: hvd.reducescatter_async(tensor),
    "grouped_reducescatter": lambda hvd, tensor: hvd.grouped_reducescatter([tensor]),
    "grouped_reducescatter_async": lambda hvd, tensor: hvd.grouped_reducescatter_async([tensor]),
    "broadcast_parameters": lambda hvd, tensor: hvd.broadcast_parameters({"weight": tensor}, 0),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # What torch warns of in torch.func, and of nested tensors


def refused(hvd: ModuleType, call: Call, kind: tuple[Callable[[Use], Any], str]) -> None:
    hand, named = kind
    with pytest.raises(UsageError) as raised:
        hand(lambda tensor: call(hvd, tensor))
    text = str(raised.value)
    assert text.startswith(f"rank {hvd.rank()}: ")
    assert f"expected a tensor with memory of its own, got {named}" in text


@pytest.mark.parametrize("call", (CALLS | WRITING).values(), ids=CALLS | WRITING)
def test_every_call_refuses_every_kind(hvd: ModuleType, call: Call) -> None:
    for kind in KINDS.values():
        refused(hvd, call, kind)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("call", WRITING.values(), ids=WRITING)
def test_what_a_copy_would_make_good(hvd: ModuleType, call: Call) -> None:
    for kind in IN_PLACE.values():
        refused(hvd, call, kind)
    assert hvd.allreduce(torch._efficientzerotensor((2,)) + 1, op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.allreduce(torch._efficientzerotensor((2,))).tolist() == [0, 0]


def test_a_call_that_is_known_refuses_too(hvd: ModuleType) -> None:
    """What was checked of a plain tensor is kept; another tensor of the same form is not covered by that."""
    for _ in range(3):
        assert hvd.allreduce_(torch.ones(4, 2)).tolist() == [[1.0, 1.0]] * 4
        assert hvd.broadcast_(torch.ones(4, 2), 0).tolist() == [[1.0, 1.0]] * 4
    for kind in ("functionalize", "vmap", "grad"):
        refused(hvd, lambda hvd, tensor: hvd.allreduce_(tensor.detach()), KINDS[kind])
        refused(hvd, lambda hvd, tensor: hvd.broadcast_(tensor.detach(), 0), KINDS[kind])


def test_subclasses_with_memory_go_on_working(hvd: ModuleType) -> None:
    tensor = torch.full((3,), float(hvd.rank())).as_subclass(Named)
    total = sum(range(hvd.size()))
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [total] * 3
    assert type(hvd.allreduce(tensor, op=hvd.Sum)) is Named
    assert hvd.allgather(tensor[:1]).tolist() == list(range(hvd.size()))
    assert hvd.broadcast_(tensor, 0).tolist() == [0.0] * 3
    buffer = torch.nn.Buffer(torch.ones(3))
    assert hvd.allreduce_(buffer, op=hvd.Sum).tolist() == [hvd.size()] * 3


@pytest.mark.parametrize("kind", ["wrapper", "functionalize"])
def test_on_one_rank_alone(hvd: ModuleType, kind: str) -> None:
    """The others learn that this rank does not take part; the job goes on."""
    if hvd.size() == 1:
        pytest.skip("needs another rank")
    if hvd.rank() == 0:
        refused(hvd, lambda hvd, tensor: hvd.allreduce_(tensor, name="one alone"), KINDS[kind])
    error = HorovodInternalError
    with pytest.raises(error):
        hvd.allreduce(torch.ones(4, 2), name="theirs" if hvd.rank() == 0 else "one alone")
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_sparse_tensors(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="got a meta tensor"):
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse().to("meta"), name="rows")
    assert hvd.sparse_allreduce_async(torch.eye(3).to_sparse())().to_dense().tolist() == torch.eye(3).tolist()


def test_optimizer_state(hvd: ModuleType) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(UsageError, match=r"broadcast_optimizer_state, parameter 0 of group 0: .*got a meta tensor"):
        hvd.broadcast_optimizer_state(torch.optim.SGD([parameter], lr=0.1), 0)
