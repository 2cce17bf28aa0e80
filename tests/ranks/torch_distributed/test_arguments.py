"""Wrong arguments: refused where they are given, with what was expected; the group goes on."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo

REFUSED = (ValueError, TypeError, RuntimeError)


@pytest.fixture(autouse=True)
def the_group_goes_on(world: World):
    yield
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == world.size


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
