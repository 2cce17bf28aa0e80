"""Asynchronous work: it is there at once, moves while Python computes, and tells how it ended."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo, mine, of_all

LATE_SECONDS = 0.3


def collectives(world: World) -> dict[str, object]:
    """Each collective with async_op=True, on tensors that are kept by the function."""
    rank, size = world.rank, world.size
    rows = lambda: [torch.zeros(2, 3) for _ in range(size)]  # noqa: E731
    parts = [mine(rank + place) for place in range(size)]
    return {
        "all_reduce": lambda: dist.all_reduce(mine(rank), async_op=True),
        "reduce": lambda: dist.reduce(mine(rank), 0, async_op=True),
        "broadcast": lambda: dist.broadcast(mine(rank), size - 1, async_op=True),
        "all_gather": lambda: dist.all_gather(rows(), mine(rank), async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            torch.zeros(2 * size, 3), mine(rank), async_op=True
        ),
        "gather": lambda: dist.gather(mine(rank), rows() if rank == 0 else None, async_op=True),
        "scatter": lambda: dist.scatter(torch.zeros(2, 3), parts if rank == 0 else None, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(2, 3), parts, async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(2, 3), torch.cat(parts), async_op=True),
        "all_to_all": lambda: dist.all_to_all(rows(), parts, async_op=True),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2 * size, 3), torch.cat(parts), async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }


NAMES = list(collectives(SimpleNamespace(rank=0, size=1)))


def test_every_collective_returns_before_the_last_rank_has_come(world: World) -> None:
    """The last rank starts its own when all others have told that theirs are begun."""
    store, last = dist.group.WORLD.get_group_store(), world.size - 1
    if world.rank == last > 0:
        store.wait([f"rank {rank} has begun" for rank in range(last)])
    works = {name: call() for name, call in collectives(world).items()}
    completed = {name: work.is_completed() for name, work in works.items()}
    store.set(f"rank {world.rank} has begun", "")
    for work in works.values():
        assert work.wait() is not False
        assert work.is_completed() or BACKEND == "gloo"
    # A root that only sends, and who sends to the root, may be done already.
    if world.rank < last:
        assert not completed["all_reduce"]
        assert not completed["all_gather"]
        assert not completed["barrier"]


def test_it_moves_while_python_computes(world: World) -> None:
    """The last rank comes when the others compute; it is done before they ask."""
    dist.barrier()
    tensor = mine(world.rank, 100_000)
    if world.rank == world.size - 1:
        time.sleep(0.1)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.perf_counter() + 10
    while not work.is_completed() and time.perf_counter() < end:
        sum(range(10_000))
    assert work.is_completed()
    work.wait()
    assert torch.equal(tensor, sum(of_all(world.size, 100_000)))


@beyond_gloo
def test_collectives_of_a_group_run_in_the_order_of_their_calls(world: World) -> None:
    """Each works on what the one before has left."""
    tensor, rows = torch.ones(1000), [torch.zeros(1000) for _ in range(world.size)]
    dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor, async_op=True)
    dist.broadcast(tensor, 0, async_op=True)
    last = dist.all_gather(rows, tensor, async_op=True)
    last.wait()
    assert all((row == world.size**2).all() for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_futures(world: World, name: str) -> None:
    """A future ends with the tensors, and runs what was attached to it, before and after its end."""
    if BACKEND == "gloo" and name.startswith("reduce_scatter"):
        pytest.skip("gloo has no future here")
    work = collectives(world)[name]()
    future = work.get_future()
    called = []
    chained = future.then(lambda done: called.append(done.value()) or "next")
    assert chained.wait() == "next"
    work.wait()
    assert future.done()
    assert len(called) == 1
    assert future.then(lambda done: "late").wait() == "late"


def test_a_future_holds_the_tensors_that_the_call_has_written(world: World) -> None:
    """DDP's communication hooks take them from there. A gathered list is as flat as the caller's."""
    rank, size = world.rank, world.size
    everything, root = of_all(size), rank == 0
    rows, gathered, several = ([torch.zeros(2, 3) for _ in range(size)] for _ in range(3))
    calls = [
        (dist.all_reduce(mine(rank), async_op=True), [sum(everything)]),
        (dist.broadcast(mine(rank), size - 1, async_op=True), everything[-1:]),
        (dist.all_gather(rows, mine(rank), async_op=True), everything),
        (dist.gather(mine(rank), gathered if root else None, async_op=True), everything if root else []),
        (dist.scatter(torch.zeros(2, 3), everything if root else None, async_op=True), [mine(rank)]),
        (dist.all_to_all_single(torch.zeros(size), torch.full((size,), 1.0), async_op=True), [torch.ones(size)]),
        (dist.barrier(async_op=True), []),
    ]
    futures = [(work.get_future(), expected) for work, expected in calls]
    futures.append((dist.all_reduce_coalesced([mine(rank)], async_op=True), [sum(everything)]))
    for future, expected in futures:
        future.wait()
        assert all(torch.equal(one, other) for one, other in zip(future.value(), expected, strict=True))
    nested = dist.all_gather_coalesced([[each] for each in several], [mine(rank)], async_op=True)
    assert torch.equal(torch.stack([row for (row,) in nested.wait()]), torch.stack(everything))


@beyond_gloo
def test_results(world: World) -> None:
    tensor = mine(world.rank)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr()
    assert work.is_success()
    assert work.exception() is None


def test_wait_ends_with_its_timeout(world: World) -> None:
    """The last rank is late; then all go on."""
    if world.size == 1:
        pytest.skip("nobody is late")
    group = dist.new_group(timeout=timedelta(seconds=60))
    tensor = mine(world.rank)
    late = world.rank == world.size - 1
    if late:
        time.sleep(LATE_SECONDS)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if not late:
        start = time.perf_counter()
        words = "(?i)timed out" if BACKEND == "gloo" else rf"rank {world.size - 1}"
        with pytest.raises(RuntimeError, match=words):
            work.wait(timedelta(seconds=0.05))
        assert time.perf_counter() - start < LATE_SECONDS
    work.wait(timedelta(seconds=20))
    assert torch.equal(tensor, sum(of_all(world.size)))
    assert dist.all_reduce(tensor, group=group) is None


@beyond_gloo
def test_an_error_is_in_wait_and_in_the_future(world: World) -> None:
    """Of a call that one rank never makes. It ends the group, and no other."""
    if world.size == 1:
        pytest.skip("nobody is missing")
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    missing = world.size - 1
    if world.rank != missing:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        chained = future.then(lambda done: done.value())
        for wait in (work.wait, work.result, future.wait, chained.wait, torch.futures.collect_all([future]).wait):
            with pytest.raises(RuntimeError, match=rf"rank {missing}\b"):
                wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is not None
        with pytest.raises(RuntimeError, match=rf"rank {missing}\b"):
            dist.barrier(group)
    dist.barrier()
    dist.destroy_process_group(group)


@beyond_gloo
def test_abort_ends_what_waits(world: World) -> None:
    """On this rank, from another thread than the one that waits."""
    if world.size == 1:
        pytest.skip("nobody to wait for")
    group = dist.new_group()
    if world.rank < world.size - 1:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        thread = threading.Timer(0.1, group.abort)
        thread.start()
        with pytest.raises(RuntimeError, match="abort"):
            work.wait()
        thread.join()
        with pytest.raises(RuntimeError, match="abort"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def test_threads_each_with_its_group(world: World) -> None:
    """Groups know nothing of each other: threads call them in any order."""
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[object] = []

    def work_in(number: int) -> None:
        try:
            for turn in range(30):
                tensor = mine(world.rank + number, 50 * (number + 1)) + turn
                work = dist.all_reduce(tensor, group=groups[number], async_op=turn % 2 == 0)
                if work is not None:
                    work.wait()
                expected = sum(mine(rank + number, 50 * (number + 1)) + turn for rank in range(world.size))
                if not torch.equal(tensor, expected):
                    wrong.append((number, turn))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work_in, args=(number,)) for number in range(len(groups))]
    # Ranks start them in different orders.
    for thread in threads if world.rank % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    for group in groups:
        dist.destroy_process_group(group)


class CallsInBackward(torch.autograd.Function):
    """Its backward begins a call in a group, destroys that, and waits for the future as C++ does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        group = dist.new_group()
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        dist.destroy_process_group(group)
        future.wait()
        return gradient


@beyond_gloo
@pytest.mark.mpi(min_size=2)
def test_a_call_of_a_backward_ends_with_its_group(world: World) -> None:
    value = torch.ones(2, requires_grad=True)
    errors = []
    try:
        CallsInBackward.apply(value).sum().backward()
    except RuntimeError as error:
        errors.append(str(error))
    # Where a core is to spare it may have been done before.
    assert all("destroyed" in each for each in errors)
    dist.barrier()
