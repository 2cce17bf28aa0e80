"""Ranks that wait for each other in different groups are told so at once; ranks that are only late are waited for."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo
from support.torch_distributed.values import mine, of_all

import hvlike
from hvlike.errors import DeadlockError

pytestmark = [beyond_gloo, pytest.mark.mpi(min_size=2)]

LATE_SECONDS = 1.5  # Longer than any wait goes unreported


@pytest.fixture
def groups(world: World) -> Iterator[tuple[Any, Any]]:
    """Two groups of all ranks."""
    both = dist.new_group(), dist.new_group()
    yield both
    dist.barrier()
    for group in both:
        dist.destroy_process_group(group)


def test_two_groups_in_crossed_order(world: World, groups: tuple[Any, Any]) -> None:
    first, second = groups
    start = time.perf_counter()
    with pytest.raises(DeadlockError) as caught:
        dist.all_reduce(mine(0), group=first) if world.rank == 0 else dist.barrier(second)
    assert time.perf_counter() - start < 20.0
    text = str(caught.value)
    assert "none of these ranks can go on: rank 0 waits in call 1, all_reduce, of the group" in text
    assert any(f"rank {rank} waits in call 1, barrier, of the group" in text for rank in range(1, world.size))
    assert "in the same order" in text
    # Both are lost, and no other.
    for group in groups:
        with pytest.raises(DeadlockError):
            dist.barrier(group)
    tensor = mine(world.rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(of_all(world.size)))


@pytest.mark.mpi(min_size=3)
def test_a_circle_of_groups_of_two(world: World) -> None:
    """No two ranks wait for each other."""
    pairs = [dist.new_group(sorted({rank, (rank + 1) % world.size})) for rank in range(world.size)]
    with pytest.raises(DeadlockError) as caught:
        dist.all_reduce(torch.ones(3), group=pairs[world.rank])
    for rank in range(world.size):
        assert f"rank {rank} waits in call 1, all_reduce, of the group" in str(caught.value)
    dist.barrier()
    for rank in {world.rank, (world.rank - 1) % world.size}:
        dist.destroy_process_group(pairs[rank])


@pytest.mark.mpi(min_size=3)
def test_a_rank_that_has_no_part_in_it_goes_on(world: World) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    hvlike.allreduce(torch.ones(2), op=hvlike.Sum)
    if world.rank < 2:
        with pytest.raises(DeadlockError, match=r"none of these ranks can go on: rank 0 waits in .*, rank 1 waits in "):
            dist.barrier(first if world.rank == 0 else second)
    # All others wait for these two here. Without a name: the ranks still count alike.
    assert hvlike.allreduce(torch.ones(2), op=hvlike.Sum).tolist() == [world.size] * 2
    dist.barrier()
    if world.rank < 2:
        dist.destroy_process_group(first)
        dist.destroy_process_group(second)


def test_a_group_and_an_operation_of_hvlike(world: World, groups: tuple[Any, Any]) -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 waits in call 1, barrier, .*rank 1 waits in allreduce 'crossed'"):
        dist.barrier(groups[0]) if world.rank == 0 else hvlike.allreduce(torch.ones(2), name="crossed")
    assert hvlike.allreduce(torch.ones(2), op=hvlike.Sum, name="crossed").tolist() == [world.size] * 2


def test_who_computes_for_long_is_late(world: World, groups: tuple[Any, Any]) -> None:
    """Rank 0 waits in one group, the others in the other one, for the last rank, which comes to both."""
    first, second = groups
    last = world.size - 1
    if world.rank == last:
        time.sleep(LATE_SECONDS)
    dist.barrier(first)
    if world.rank == 0:
        time.sleep(LATE_SECONDS)
    dist.barrier(second)


def test_another_thread_may_make_the_call(world: World, groups: tuple[Any, Any]) -> None:
    first, second = groups

    def later() -> None:
        time.sleep(LATE_SECONDS)
        dist.barrier(first)

    if world.rank == 0:
        dist.barrier(first)
        dist.barrier(second)
    else:
        thread = threading.Thread(target=later)
        thread.start()
        dist.barrier(second)
        thread.join()


def test_what_is_chained_to_a_future_may_make_the_call(world: World, groups: tuple[Any, Any]) -> None:
    first, second = groups

    def later(future: Any) -> None:
        time.sleep(LATE_SECONDS)
        dist.barrier(first)

    if world.rank == 0:
        dist.barrier(first)
        dist.barrier(first)
        dist.barrier(second)
    else:
        dist.barrier(first, async_op=True).get_future().then(later)
        dist.barrier(second)


def test_a_wait_with_a_timeout_is_left_to_it(world: World, groups: tuple[Any, Any]) -> None:
    """The program may go on after that, as it does here."""
    first, second = groups
    work = dist.barrier(first if world.rank == 0 else second, async_op=True)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="Missing: rank"):
            work.wait(timedelta(seconds=LATE_SECONDS))
        dist.barrier(second)
    else:
        work.wait()
        dist.barrier(first)
    work.wait()
