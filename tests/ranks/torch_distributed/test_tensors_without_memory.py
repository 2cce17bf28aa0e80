"""Tensors without memory of their own are refused before a call begins; the group goes on.

torch's own backends refuse them, too: NotImplementedError. Their addresses were read here once, which was a SIGSEGV.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo
from support.without_memory import IN_PLACE, KINDS, Named
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hvlike as hvd
from hvlike.errors import ProcessGroupError, UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = [
    beyond_gloo,
    pytest.mark.filterwarnings("ignore"),  # What torch warns of in torch.func, and of nested tensors
]


def like(tensor: Tensor, rows: int) -> Tensor:
    """A plain tensor for the other side of a call, of its size as far as that is known."""
    try:
        return torch.empty(rows * tensor.numel(), dtype=tensor.dtype)
    except (RuntimeError, TypeError):
        return torch.empty(rows)


CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda tensor, size: dist.all_reduce(tensor),
    "all_reduce, async": lambda tensor, size: dist.all_reduce(tensor, async_op=True),
    "all_reduce by MAX": lambda tensor, size: dist.all_reduce(tensor, dist.ReduceOp.MAX),
    "reduce": lambda tensor, size: dist.reduce(tensor, 0),
    "broadcast": lambda tensor, size: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor, size: dist.all_gather([tensor] * size, tensor),
    "all_gather_into_tensor": lambda tensor, size: dist.all_gather_into_tensor(like(tensor, size), tensor),
    "reduce_scatter": lambda tensor, size: dist.reduce_scatter(tensor, [tensor] * size),
    "reduce_scatter_tensor": lambda tensor, size: dist.reduce_scatter_tensor(tensor, like(tensor, size)),
    "all_to_all": lambda tensor, size: dist.all_to_all([tensor] * size, [tensor] * size),
    "send": lambda tensor, size: dist.send(tensor, (dist.get_rank() + 1) % size),
    "isend": lambda tensor, size: dist.isend(tensor, (dist.get_rank() + 1) % size),
    "irecv": lambda tensor, size: dist.irecv(tensor, (dist.get_rank() + 1) % size),
}


@pytest.fixture(autouse=True)
def the_group_goes_on(world: World):
    yield
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == world.size


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_refuses_every_kind(world: World, call: Callable[[Tensor, int], Any]) -> None:
    if world.size == 1:
        pytest.skip("needs another rank")
    for hand, named in (KINDS | IN_PLACE).values():
        with pytest.raises(ProcessGroupError) as raised:
            hand(lambda tensor: call(tensor, world.size))
        assert f"expected a tensor with memory of its own, got {named}" in str(raised.value)


def test_on_the_other_side(world: World) -> None:
    meta = torch.ones(world.size, device="meta")
    for call in (
        lambda: dist.all_gather_into_tensor(meta, torch.ones(1)),
        lambda: dist.reduce_scatter_tensor(torch.ones(1), meta),
        lambda: dist.all_to_all_single(meta, torch.ones(world.size)),
        lambda: dist.all_to_all_single(torch.ones(world.size), meta),
        lambda: dist.gather(meta[:1], [torch.ones(1)] * world.size if world.rank == 0 else None),
        lambda: dist.scatter(meta[:1], [torch.ones(1)] * world.size if world.rank == 0 else None),
    ):
        with pytest.raises(ProcessGroupError, match="got a meta tensor"):
            call()


def test_subclasses_with_memory(world: World) -> None:
    tensor = torch.ones(3).as_subclass(Named)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 3


@pytest.fixture
def sharded(world: World) -> Tensor:
    mesh = init_device_mesh("cpu", (world.size,))
    return distribute_tensor(torch.arange(4.0 * world.size).view(-1, 2), mesh, [Shard(0)])


def test_dtensors(world: World, sharded: Tensor) -> None:
    replicated = distribute_tensor(torch.ones(3), sharded.device_mesh, [Replicate()])
    for call in (
        lambda: dist.all_reduce(sharded),
        lambda: dist.broadcast(replicated, 0),
        lambda: hvd.allreduce(sharded),
        lambda: hvd.allreduce(replicated),
        lambda: hvd.allgather(sharded),
        lambda: hvd.broadcast_parameters({"weight": sharded}, root_rank=0),
        lambda: hvd.grouped_allreduce([torch.ones(2), sharded]),
    ):
        with pytest.raises(UsageError, match=r"got a DTensor of shape \[.*\]; pass its to_local\(\)"):
            call()
    assert sharded.to_local().tolist() == torch.arange(4.0 * world.size).view(-1, 2).tolist()[2 * world.rank :][:2]


def test_objects_that_hold_dtensors(world: World, sharded: Tensor) -> None:
    """A pickled DTensor is the part of the rank that has sent it, as in torch's own collectives of objects."""
    found = hvd.allgather_object({"weight": sharded})
    parts = [each["weight"].to_local() for each in found]
    assert torch.cat(parts).tolist() == torch.arange(4.0 * world.size).view(-1, 2).tolist()


def test_what_waits_for_a_collective(world: World) -> None:
    functional = torch.distributed._functional_collectives
    pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    if type(pending) is torch.Tensor:
        pytest.skip("this torch waits at once")
    with pytest.raises(UsageError, match=r"got an? AsyncCollectiveTensor.*wait\(\)"):
        hvd.allreduce(pending)
    assert hvd.allreduce(pending.wait()).tolist() == [world.size] * 3


def test_sharded_parameters(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(torch.nn.Linear(4, 4))
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    for wrap in (
        lambda: hvd.DistributedOptimizer(plain, named_parameters=module.named_parameters()),
        lambda: hvd.DistributedOptimizer(plain, op=hvd.Adasum),
        lambda: ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1),
        lambda: DistributedDataParallel(module),
    ):
        with pytest.raises(UsageError, match=r"DTensor of shape .* reduce its gradients themselves"):
            wrap()
    module(torch.ones(1, 4)).sum().backward()
    plain.step()
