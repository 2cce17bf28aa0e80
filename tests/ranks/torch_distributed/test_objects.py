"""Collectives of objects, and barriers."""

import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World


class Point:
    """An object of a program's own class."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x


def of_rank(rank: int) -> list[object]:
    """Objects of different sizes on different ranks."""
    return [{"rank": rank}, "a" * 1000 * rank, Point(rank), None, torch.arange(rank)]


def same(one: list[object], other: list[object]) -> bool:
    return one[:4] == other[:4] and torch.equal(one[4], other[4])


def test_all_gather_object(world: World) -> None:
    objects = [None] * world.size
    dist.all_gather_object(objects, of_rank(world.rank))
    assert all(same(each, of_rank(rank)) for rank, each in enumerate(objects))


def test_objects_from_and_to_every_root(world: World) -> None:
    everything = [of_rank(rank) for rank in range(world.size)]
    for root in range(world.size):
        is_root = world.rank == root
        gathered = [None] * world.size if is_root else None
        dist.gather_object(of_rank(world.rank), gathered, dst=root)
        assert gathered is None or all(map(same, gathered, everything))
        objects = of_rank(world.rank)
        dist.broadcast_object_list(objects, src=root)
        assert same(objects, of_rank(root))
        part = [None]
        dist.scatter_object_list(part, everything if is_root else None, src=root)
        assert same(part[0], of_rank(world.rank))


def test_a_large_object(world: World) -> None:
    objects = [bytes(5_000_000) if world.rank == 0 else None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [bytes(5_000_000)]


def test_an_object_that_cannot_be_pickled(world: World) -> None:
    """It fails before anything is sent; the group goes on."""
    with pytest.raises((AttributeError, TypeError, RuntimeError, pickle.PicklingError)):
        dist.all_gather_object([None] * world.size, lambda: None)
    test_all_gather_object(world)


def test_nobody_leaves_a_barrier_before_the_last_has_come(world: World) -> None:
    times = [torch.zeros(1, dtype=torch.double) for _ in range(world.size)]
    if world.rank == world.size - 1:
        time.sleep(0.2)
    came = time.time()
    dist.barrier()
    left = time.time()
    dist.all_gather(times, torch.tensor([came], dtype=torch.double))
    assert left >= max(times) - 0.01
    dist.barrier(async_op=True).wait()
    dist.barrier(timeout=timedelta(seconds=60))


def test_a_monitored_barrier_where_all_come(world: World) -> None:
    if world.rank == 0:
        time.sleep(0.1)
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.monitored_barrier(wait_all_ranks=True)
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))
    group = dist.new_group([0])
    dist.monitored_barrier(group) if world.rank == 0 else None


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing(world: World, wait_all_ranks: bool) -> None:
    """On rank 0; the last rank does not come in time. Other ranks fail, too."""
    if world.size == 1:
        pytest.skip("nobody can be missing")
    group = dist.new_group(timeout=timedelta(seconds=30))
    missing = world.size - 1
    if world.rank != missing:
        told = rf"Rank {world.rank} successfully reached monitoredBarrier, but received errors .* from rank 0"
        with pytest.raises(RuntimeError, match=told if world.rank else rf"[Rr]anks? {missing}\b"):
            dist.monitored_barrier(group, timedelta(seconds=0.5), wait_all_ranks=wait_all_ranks)
    dist.barrier()
    if BACKEND != "gloo":
        dist.destroy_process_group(group)


def test_a_monitored_barrier_of_no_time_that_nobody_else_calls(world: World) -> None:
    if world.size == 1:
        pytest.skip("nobody can be missing")
    group = dist.new_group()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta())
