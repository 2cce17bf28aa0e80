"""Wrong arguments, and tensors without memory of their own: refused where they are given; the group goes on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo
from support.without_memory import IN_PLACE, KINDS, Named
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hvlike as hvd
from hvlike.errors import ProcessGroupError, UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

REFUSED = (ValueError, TypeError, RuntimeError)


WRONG: dict[str, Callable[[int], object]] = {
    "all_reduce of no tensor": lambda size: dist.all_reduce([1.0]),
    "all_reduce by MIN of complex tensors": lambda size: dist.all_reduce(
        torch.ones(2, dtype=torch.cfloat), dist.ReduceOp.MIN
    ),
    "all_reduce of elements that share memory": lambda size: dist.all_reduce(torch.ones(1).expand(4)),
    "all_reduce of a mean of truth values": lambda size: dist.all_reduce(torch.ones(2).bool(), dist.ReduceOp.AVG),
    "reduce of a mean of truth values": lambda size: dist.reduce(torch.ones(2).bool(), 0, dist.ReduceOp.AVG),
    "reduce_scatter of a mean of truth values": lambda size: dist.reduce_scatter_tensor(
        torch.ones(2).bool(), torch.ones(2 * size).bool(), dist.ReduceOp.AVG
    ),
    "broadcast from a rank that is not there": lambda size: dist.broadcast(torch.ones(2), size),
    "reduce to a rank that is not there": lambda size: dist.reduce(torch.ones(2), size),
    "all_gather into too short a list": lambda size: dist.all_gather([torch.ones(2)] * (size - 1), torch.ones(2)),
    "all_gather into too long a list": lambda size: dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2)),
    "all_gather into other dtypes": lambda size: dist.all_gather([torch.ones(2).int()] * size, torch.ones(2)),
    "all_gather of another shape than the output": lambda size: dist.all_gather(
        [torch.ones(3) for _ in range(size)], torch.ones(2)
    ),
    "all_gather_into_tensor of another dtype": lambda size: dist.all_gather_into_tensor(
        torch.ones(2 * size).int(), torch.ones(2)
    ),
    "all_gather_into_tensor of another size": lambda size: dist.all_gather_into_tensor(
        torch.ones(2 * size + 1), torch.ones(2)
    ),
    "reduce_scatter of too short a list": lambda size: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * (size - 1)),
    "reduce_scatter into another shape": lambda size: dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * size),
    "reduce_scatter_tensor of another size": lambda size: dist.reduce_scatter_tensor(
        torch.ones(2), torch.ones(2 * size + 1)
    ),
    "reduce_scatter_tensor of another dtype": lambda size: dist.reduce_scatter_tensor(
        torch.ones(2), torch.ones(2 * size).int()
    ),
    "all_to_all of too short a list": lambda size: dist.all_to_all(
        [torch.ones(2)] * size, [torch.ones(2)] * (size - 1)
    ),
    "all_to_all of two dtypes": lambda size: dist.all_to_all([torch.ones(2).int()] * size, [torch.ones(2)] * size),
    "all_to_all_single whose rows cannot be split": lambda size: (
        dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1))
        if size > 1
        else dist.all_to_all_single(torch.ones(2), torch.ones(2), [1], [1])
    ),
    "all_to_all_single whose splits are not all rows": lambda size: dist.all_to_all_single(
        torch.ones(size), torch.ones(size), [2] * size, [1] * size
    ),
    "all_to_all_single with too few splits": lambda size: dist.all_to_all_single(
        torch.ones(size), torch.ones(size), [1] * (size + 1), [1] * (size + 1)
    ),
    "all_to_all_single of another dtype": lambda size: dist.all_to_all_single(torch.ones(size).int(), torch.ones(size)),
    "a root and its place at the same time": lambda size: dist.broadcast(torch.ones(1), 0, group_src=0),
    "an operation that is none": lambda size: dist.all_reduce(torch.ones(1), "sum"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(world: World, case: str) -> None:
    if BACKEND == "gloo" and case.endswith(("cannot be split", "share memory")):
        pytest.skip("gloo does what it can")
    with pytest.raises(REFUSED):
        WRONG[case](world.size)


def test_no_list_is_given_to_the_root(world: World) -> None:
    """Only the root can see it, and says so before anything is sent."""
    if world.size > 1:
        pytest.skip("other ranks would wait")
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather(torch.ones(1), None, dst=0)
    with pytest.raises(ValueError, match="scatter_list"):
        dist.scatter(torch.ones(1), None, src=0)


def test_a_list_is_given_to_another_than_the_root(world: World) -> None:
    if world.rank > 0:
        with pytest.raises(ValueError, match="gather_list"):
            dist.gather(torch.ones(1), [torch.ones(1)] * world.size, dst=0)


def test_the_reason_is_in_the_message(world: World) -> None:
    with pytest.raises(REFUSED, match=rf"{world.size}"):
        dist.all_gather([torch.ones(2)] * (world.size + 1), torch.ones(2))


@beyond_gloo
@pytest.mark.parametrize("difference", ["shape", "dtype", "operation", "collective"])
def test_ranks_whose_calls_differ_are_told(world: World, difference: str) -> None:
    """On every rank, instead of wrong values; between nodes by the timeout. It ends the group, and no other."""
    if world.size == 1:
        pytest.skip("nobody differs")
    group = dist.new_group(timeout=timedelta(seconds=5))
    differs = world.rank == world.size - 1
    tensor = torch.ones(3 + (differs and difference == "shape"))
    tensor = tensor.double() if differs and difference == "dtype" else tensor
    op = dist.ReduceOp.MAX if differs and difference == "operation" else dist.ReduceOp.SUM
    reduce = dist.all_reduce(tensor, op, group=group, async_op=True)
    rows = [torch.zeros(1) for _ in range(world.size)]
    if differs and difference == "collective":
        second = dist.all_gather(rows, torch.zeros(1), group=group, async_op=True)
    else:
        second = dist.all_reduce(tensor, op, group=group, async_op=True)
    with pytest.raises(RuntimeError, match=r"another operation|different operations|timed out"):
        all(work.wait() for work in (reduce, second))
    dist.barrier()  # Who has left cannot tell any more what it has called.
    dist.destroy_process_group(group)


# -- tensors without memory: their addresses were read here once, which was a SIGSEGV ------------------------


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


@beyond_gloo
@pytest.mark.filterwarnings("ignore")  # What torch warns of in torch.func, and of nested tensors
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_refuses_every_kind(world: World, call: Callable[[Tensor, int], Any]) -> None:
    if world.size == 1:
        pytest.skip("needs another rank")
    for hand, named in (KINDS | IN_PLACE).values():
        with pytest.raises(ProcessGroupError) as raised:
            hand(lambda tensor: call(tensor, world.size))
        assert f"expected a tensor with memory of its own, got {named}" in str(raised.value)


@beyond_gloo
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


@beyond_gloo
def test_subclasses_with_memory(world: World) -> None:
    tensor = torch.ones(3).as_subclass(Named)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 3


@pytest.fixture
def sharded(world: World) -> Tensor:
    mesh = init_device_mesh("cpu", (world.size,))
    return distribute_tensor(torch.arange(4.0 * world.size).view(-1, 2), mesh, [Shard(0)])


@beyond_gloo
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


@beyond_gloo
def test_objects_that_hold_dtensors(world: World, sharded: Tensor) -> None:
    """A pickled DTensor is the part of the rank that has sent it, as in torch's own collectives of objects."""
    found = hvd.allgather_object({"weight": sharded})
    parts = [each["weight"].to_local() for each in found]
    assert torch.cat(parts).tolist() == torch.arange(4.0 * world.size).view(-1, 2).tolist()


@beyond_gloo
def test_what_waits_for_a_collective(world: World) -> None:
    functional = torch.distributed._functional_collectives
    pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    if type(pending) is torch.Tensor:
        pytest.skip("this torch waits at once")
    with pytest.raises(UsageError, match=r"got an? AsyncCollectiveTensor.*wait\(\)"):
        hvd.allreduce(pending)
    assert hvd.allreduce(pending.wait()).tolist() == [world.size] * 3


@beyond_gloo
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
