"""torch's profilers show the calls with the shapes of their tensors, and the waits; CommDebugMode counts the calls."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World
from torch.autograd.profiler import profile as autograd_profile
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile


def _kineto() -> Any:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def _calls(size: int) -> dict[str, Callable[[], object]]:
    tensor, rows = torch.ones(2, 3), [torch.ones(2, 3) for _ in range(size)]
    whole = torch.ones(2 * size, 3)
    return {
        "allreduce_": lambda: dist.all_reduce(tensor),
        "broadcast_": lambda: dist.broadcast(tensor, 0),
        "reduce_": lambda: dist.reduce(tensor, 0),
        "allgather_": lambda: dist.all_gather(rows, tensor),
        "_allgather_base_": lambda: dist.all_gather_into_tensor(whole, tensor),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(tensor, whole),
        "alltoall_base_": lambda: dist.all_to_all_single(torch.ones(2 * size, 3), whole),
    }


def _events(recorded: Any) -> list[Any]:
    """What a profile has recorded of the backend."""
    events = recorded.function_events if isinstance(recorded, autograd_profile) else recorded.events()
    return [event for event in events if event.name.startswith(f"{BACKEND}:")]


def _names(recorded: Any) -> set[str]:
    return {event.name.removeprefix(f"{BACKEND}:") for event in _events(recorded)}


@pytest.mark.parametrize(
    "profiler", [_kineto, lambda: autograd_profile(record_shapes=True)], ids=["kineto", "autograd"]
)
def test_a_profile_shows_collectives(world: World, profiler: Callable[[], Any]) -> None:
    with profiler() as recorded:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0)
        dist.barrier()
    assert _names(recorded) >= {"all_reduce", "broadcast", "barrier"}
    (event,) = [event for event in _events(recorded) if event.name == f"{BACKEND}:all_reduce"]
    assert event.input_shapes == [[2, 3]]


def test_a_profile_shows_messages_and_waits(world: World) -> None:
    if world.size == 1:
        pytest.skip("nobody to wait for")
    with _kineto() as recorded:
        if world.rank:
            work: Any = dist.irecv(torch.ones(2), 0)
        dist.barrier()
        if world.rank:
            work.wait()
        else:
            time.sleep(0.2)  # Until all others wait: who leaves the barrier late would find its message there
            for other in range(1, world.size):
                dist.send(torch.ones(2), other)
    assert ("recv" if world.rank else "send") in _names(recorded)
    assert world.rank == 0 or BACKEND == "gloo" or "wait" in _names(recorded)


def test_calls_before_and_after_are_not_in_a_profile(world: World) -> None:
    work: Any = dist.all_reduce(torch.ones(2), async_op=True)
    with _kineto() as recorded:
        torch.ones(1).add_(1)
    work.wait()
    dist.barrier()
    assert not _names(recorded)


def test_the_number_of_collectives(world: World) -> None:
    for name, call in _calls(world.size).items():
        with CommDebugMode() as mode:
            call()
            call()
        assert mode.get_comm_counts() == {getattr(torch.ops.c10d, name): 2}
    with CommDebugMode() as outer, CommDebugMode() as inner:
        dist.all_reduce(torch.ones(2))
    assert (outer.get_total_counts(), inner.get_total_counts()) == (1, 1)
