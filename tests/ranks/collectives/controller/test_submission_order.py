"""Named requests may come in any order on each rank; unnamed ones meet by kind; groups are whole."""

import random
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.collectives.inputs import DTYPES, contribution, reduced, same

from hvlike.collectives.api.gather_scatter import allgather, allgather_async

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


def test_mixed_kinds_in_another_order_on_each_rank(hvd: ModuleType) -> None:
    def broadcast(index: int) -> Any:
        return hvd.broadcast_async(torch.tensor([hvd.rank(), index]), index % hvd.size(), name=str(index))

    def gather(index: int) -> Any:
        return allgather_async(torch.tensor([hvd.rank(), index]), name=str(index))

    def reduce(index: int) -> Any:
        dtype = SUMMABLE[index % len(SUMMABLE)]
        return hvd.allreduce_async(contribution(hvd.rank(), (9,), dtype, index), name=str(index), op=hvd.Sum)

    def group(index: int) -> Any:
        parts = [
            contribution(hvd.rank(), (5,), torch.float32, index),
            contribution(hvd.rank(), (3,), torch.int64, index),
        ]
        return hvd.grouped_allreduce_async(parts, name=str(index), op=hvd.Sum)

    calls = [(kind, index) for kind in (broadcast, gather, reduce, group) for index in range(12)]
    random.Random(hvd.rank()).shuffle(calls)
    # The same names under other kinds do not meet.
    handles = {(kind, index): kind(index) for kind, index in calls}
    for index in range(12):
        assert hvd.synchronize(handles[broadcast, index]).tolist() == [index % hvd.size(), index]
        rows = [each for rank in range(hvd.size()) for each in (rank, index)]
        assert hvd.synchronize(handles[gather, index]).tolist() == rows
        same(hvd.synchronize(handles[reduce, index]), expected_sum(hvd, (9,), SUMMABLE[index % len(SUMMABLE)], index))
        first, second = hvd.synchronize(handles[group, index])
        same(first, expected_sum(hvd, (5,), torch.float32, index))
        same(second, expected_sum(hvd, (3,), torch.int64, index))


def test_fused_reductions_keep_their_dtypes_and_sizes_apart(hvd: ModuleType) -> None:
    shapes = [(0,), (), (1,), (17, 3), (20_000,), (70_000,)]
    cases = [(shape, dtype) for shape in shapes for dtype in SUMMABLE]
    handles = [
        hvd.allreduce_async(contribution(hvd.rank(), shape, dtype, index), op=hvd.Sum)
        for index, (shape, dtype) in enumerate(cases)
    ]
    for index, (handle, (shape, dtype)) in enumerate(zip(handles, cases, strict=True)):
        same(hvd.synchronize(handle), expected_sum(hvd, shape, dtype, index))


def test_other_factors_and_ops_are_not_fused_together(hvd: ModuleType) -> None:
    mine = torch.tensor([float(hvd.rank() + 1)])
    ops = [hvd.Sum, hvd.Max, hvd.Min, hvd.Average]
    handles = [
        (op, factor, hvd.allreduce_async(mine, op=op, postscale_factor=factor)) for op in ops for factor in (1, 2)
    ]
    inputs = [torch.tensor([float(rank + 1)]) for rank in range(hvd.size())]
    for op, factor, handle in handles:
        same(hvd.synchronize(handle), reduced(op, inputs, 1.0, factor))


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


def test_a_barrier_passes_operations_in_flight(hvd: ModuleType) -> None:
    early = hvd.rank() % 2 == 0
    handle = hvd.allreduce_async(torch.ones(2), name="across", op=hvd.Sum) if early else None
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="across", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [float(hvd.size())] * 2


def test_a_barrier_waits_for_the_last_rank(hvd: ModuleType) -> None:
    # The clock of the machine, which nobody sets meanwhile.
    started = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.2)
    hvd.barrier()
    ended = torch.tensor([started, time.monotonic()], dtype=torch.float64)
    times = allgather(ended.reshape(1, 2))
    assert times[:, 1].min() >= times[-1, 0] + 0.19
