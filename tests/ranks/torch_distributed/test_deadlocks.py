"""Ranks that wait for each other, or whose threads call in another order, are told; who is late is waited for."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo, mine, of_all

import hvlike
from hvlike.errors import DeadlockError, MismatchError

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


@pytest.mark.parametrize("who", ["another thread", "what is chained to a future"])
def test_others_may_make_the_call(world: World, groups: tuple[Any, Any], who: str) -> None:
    first, second = groups

    def later(_: object = None) -> None:
        time.sleep(LATE_SECONDS)
        dist.barrier(first)

    if world.rank == 0:
        dist.barrier(first)
        dist.barrier(first)
        dist.barrier(second)
        return
    begun = dist.barrier(first, async_op=True)
    thread = threading.Thread(target=later)
    if who == "another thread":
        thread.start()
        dist.barrier(second)
        thread.join()
    else:
        begun.get_future().then(later)
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


def in_threads(*calls: Callable[[], dist.Work]) -> list[BaseException]:
    """Make the calls one after the other, each in a thread of its own, which then waits; return how they ended."""
    errors: list[BaseException] = []
    made = [threading.Event() for _ in calls]

    def run(number: int) -> None:
        if number:
            made[number - 1].wait()
        work = calls[number]()
        made[number].set()
        try:
            work.wait()
        except MismatchError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("late", [1, 2], ids=["one other call", "two other calls"])
def test_the_error_names_the_call_that_differs(world: World, late: int) -> None:
    """Of several threads in one group. The error of a call that ended with an earlier one once described itself, as
    "barrier() here, but rank 1 barrier()".
    """
    group = dist.new_group(list(range(world.size)))
    dist.barrier(group)

    def barrier() -> dist.Work:
        return dist.barrier(group, async_op=True)

    def reduce() -> dist.Work:
        return dist.all_reduce(torch.ones(5, 2), group=group, async_op=True)

    first, *others = (reduce, *[barrier] * late) if world.rank == 0 else (barrier, reduce, *[barrier] * (late - 1))
    errors = in_threads(first, *others)
    # All have asked the others what they have called.
    dist.barrier()
    assert len(errors) == 1 + late
    mine, theirs = "all_reduce(float32 [5, 2])", "barrier()"
    if world.rank:
        mine, theirs = theirs, mine
    for error in errors:
        text = str(error)
        assert re.search(rf"call \d+, {mine.split('(')[0]}, of the group", text)
        assert f"is {mine} here, but " in text
        # One that has ended its calls already may not be named.
        differing = [0] if world.rank else range(1, world.size)
        assert any(f"rank {rank} {theirs}" in text for rank in differing)
        assert "threads need a group each" in text
    assert sum("ended with an earlier one: " in str(error) for error in errors) == late
    dist.destroy_process_group(group)
