"""Calls of several threads in one group that come in another order on another rank: the error names the place.

The error of a call that ended with an earlier one once described itself, as "barrier() here, but rank 1 barrier()".
"""

import re
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo

from hvlike.errors import MismatchError

pytestmark = beyond_gloo


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
    if world.size == 1:
        pytest.skip("nobody differs")
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
