"""Named requests may come in any order on each rank; unnamed ones meet by kind; groups are whole; waits are known."""

import random
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.collectives.inputs import DTYPES, contribution, reduced, same

from hvlike import allgather, allgather_async
from hvlike.collectives.requests.request import find_call_site
from hvlike.collectives.session.context import current

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]

SUMMABLE = tuple(dtype for dtype in DTYPES if dtype is not torch.bool)


def expected_sum(hvd: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return reduced(hvd.Sum, [contribution(rank, shape, dtype, seed) for rank in range(hvd.size())])


def test_two_hundred_in_flight_in_another_order_on_each_rank(hvd: ModuleType) -> None:
    order = list(range(200))
    random.Random(hvd.rank()).shuffle(order)
    given = {index: torch.full((index % 7 + 1,), float(index + hvd.rank())) for index in order}
    handles = {index: hvd.allreduce_async_(given[index], name=f"tensor {index}", op=hvd.Sum) for index in order}
    random.Random(hvd.rank() + 100).shuffle(order)
    ranks = sum(range(hvd.size()))
    for index in order:
        assert hvd.synchronize(handles[index]).tolist() == [float(index * hvd.size() + ranks)] * (index % 7 + 1)


def test_fused_reductions_keep_their_dtypes_and_sizes_apart(hvd: ModuleType) -> None:
    shapes = [(0,), (), (1,), (17, 3), (20_000,), (70_000,)]
    cases = [(shape, dtype) for shape in shapes for dtype in SUMMABLE]
    handles = [
        hvd.allreduce_async(contribution(hvd.rank(), shape, dtype, index), op=hvd.Sum)
        for index, (shape, dtype) in enumerate(cases)
    ]
    for index, (handle, (shape, dtype)) in enumerate(zip(handles, cases, strict=True)):
        same(hvd.synchronize(handle), expected_sum(hvd, shape, dtype, index))


def test_a_group_may_mix_dtypes_and_sizes(hvd: ModuleType) -> None:
    cases = [((4,), torch.float32), ((0, 3), torch.int64), ((), torch.bfloat16), ((70_000,), torch.float32)]
    cases += [((11,), torch.complex128), ((5,), torch.uint8)]
    given = [contribution(hvd.rank(), shape, dtype) for shape, dtype in cases]
    results = hvd.grouped_allreduce(given, op=hvd.Sum, name="mixed")
    assert isinstance(results, list)
    for result, (shape, dtype) in zip(results, cases, strict=True):
        same(result, expected_sum(hvd, shape, dtype, 0))


@pytest.mark.mpi(min_size=2)
def test_a_group_is_never_reduced_in_part(hvd: ModuleType) -> None:
    given = [torch.ones(3), torch.ones(100_000)]
    if hvd.rank() == 0:
        hvd.allreduce_(torch.ones(1), name="before", op=hvd.Sum)
        hvd.barrier()
        handle = hvd.grouped_allreduce_async_(given, name="whole", op=hvd.Sum)
    else:
        handle = hvd.grouped_allreduce_async_(given, name="whole", op=hvd.Sum)
        hvd.allreduce_(torch.ones(1), name="before", op=hvd.Sum)
        # Rank 0 has not asked for the group yet: nothing of it may have changed.
        assert not handle.done()
        assert all(bool((each == 1).all()) for each in given)
        hvd.barrier()
    hvd.synchronize(handle)
    assert all(bool((each == hvd.size()).all()) for each in given)


@pytest.mark.mpi(min_size=2)
def test_unnamed_operations_are_counted_by_kind(hvd: ModuleType) -> None:
    # The second rank issues its kinds in another order: with one counter for all they would not meet.
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum),
        lambda: hvd.broadcast_async(torch.tensor([float(hvd.rank())]), 1),
        lambda: hvd.grouped_allreduce_async([torch.tensor([2.0])], op=hvd.Sum),
        lambda: allgather_async(torch.tensor([3.0])),
    ]
    order = list(range(4)) if hvd.rank() != 1 else [3, 2, 1, 0]
    handles = {index: calls[index]() for index in order}
    assert hvd.synchronize(handles[0]).tolist() == [float(hvd.size())]
    assert hvd.synchronize(handles[1]).tolist() == [1.0]
    assert hvd.synchronize(handles[2])[0].tolist() == [2.0 * hvd.size()]
    assert hvd.synchronize(handles[3]).tolist() == [3.0] * hvd.size()


def test_a_barrier_waits_for_the_last_rank(hvd: ModuleType) -> None:
    # The clock of the machine, which nobody sets meanwhile.
    started = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.2)
    hvd.barrier()
    ended = torch.tensor([started, time.monotonic()], dtype=torch.float64)
    times = allgather(ended.reshape(1, 2))
    assert times[:, 1].min() >= times[-1, 0] + 0.19


def test_it_is_what_was_asked_for_last_and_its_thread_may_ask_for_more(hvd: ModuleType) -> None:
    controller = current().find_set(None, "test").controller
    seen: list[bool] = []
    leave = threading.Event()

    def wait() -> None:
        controller.wait_in_order("of a test", 1, lambda: True, lambda error: None, place=find_call_site())
        seen.append(True)
        leave.wait(30.0)

    # A daemon counts once it has asked for something.
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        assert current().fabric.loop.wait(lambda: bool(seen), 30.0)
        assert controller.tensor_queue.last is not None
        assert controller.tensor_queue.last[0] == ("step", "of a test")
        assert not controller.tensor_queue.has_one_thread()
    finally:
        leave.set()
        thread.join()
