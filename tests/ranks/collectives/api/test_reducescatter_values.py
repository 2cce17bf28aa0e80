"""reducescatter: each rank's rows of the reduction by definition, for every op, dtype, shape and layout."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.collectives.inputs import DTYPES, LAYOUTS, OPS, contribution, defined, reduced, same
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.controller.operations import even_rows

CASES = [(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]


def mine_of(hvd: ModuleType, total: Tensor) -> Tensor:
    """The rows of this rank."""
    return total.split(list(even_rows(len(total), hvd.size())))[hvd.rank()]


@pytest.mark.parametrize(
    ("total", "size", "rows"),
    [(5, 2, (3, 2)), (5, 3, (2, 2, 1)), (2, 4, (1, 1, 0, 0)), (0, 3, (0, 0, 0)), (8, 4, (2, 2, 2, 2)), (7, 1, (7,))],
)
def test_the_first_ranks_have_one_row_more(total: int, size: int, rows: tuple[int, ...]) -> None:
    assert even_rows(total, size) == rows


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_rows_of_the_reduction(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    for shape in ((0, 3), (1,), (5, 2, 3), (2 * hvd.size(), 0), (4 * hvd.size(), 7)):
        every = [contribution(rank, shape, dtype) for rank in range(hvd.size())]
        given = every[hvd.rank()].clone()
        same(hvd.reducescatter(given, op=op), mine_of(hvd, reduced(op, every)))
        assert torch.equal(given, every[hvd.rank()])
        same(hvd.synchronize(hvd.reducescatter_async(given, op=op)), mine_of(hvd, reduced(op, every)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(hvd: ModuleType, layout: Any) -> None:
    every = [contribution(rank, (5, 3, 4, 5), torch.float32) for rank in range(hvd.size())]
    given = layout(every[hvd.rank()])
    same(hvd.reducescatter(given, op=hvd.Sum), mine_of(hvd, reduced(hvd.Sum, every)))
    assert torch.equal(given, every[hvd.rank()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_larger_than_a_chunk(hvd: ModuleType, dtype: torch.dtype) -> None:
    for shape in ((7, 50_001), (300_001,)):
        every = [contribution(rank, shape, dtype) for rank in range(hvd.size())]
        same(hvd.reducescatter(every[hvd.rank()], op=hvd.Sum), mine_of(hvd, reduced(hvd.Sum, every)))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int16], ids=str)
def test_factors(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    every = [contribution(rank, (6, 2), dtype) for rank in range(hvd.size())]
    result = hvd.reducescatter(every[hvd.rank()], op=op, prescale_factor=2.0, postscale_factor=0.5)
    same(result, mine_of(hvd, reduced(op, every, 2.0, 0.5)))


def test_the_default_is_the_average(hvd: ModuleType) -> None:
    result = hvd.reducescatter(torch.full((hvd.size(), 2), float(hvd.rank())))
    same(result, torch.full((1, 2), (hvd.size() - 1) / 2))


def test_the_order_of_the_arguments_is_horovods(hvd: ModuleType) -> None:
    ones = torch.ones(hvd.size())
    scaled = hvd.reducescatter(ones, "rows", hvd.Compression.fp16, hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert scaled.tolist() == [6.0 * hvd.size()]
    handle = hvd.reducescatter_async(ones, "rows", hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert hvd.synchronize(handle).tolist() == [6.0 * hvd.size()]
    group = hvd.grouped_reducescatter([ones], "rows", hvd.Compression.fp16, hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert group[0].tolist() == [6.0 * hvd.size()]
    handle = hvd.grouped_reducescatter_async([ones], "rows", hvd.Sum, hvd.global_process_set, 2.0, 3.0)
    assert hvd.synchronize(handle)[0].tolist() == [6.0 * hvd.size()]


@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "async"])
def test_a_group_of_mixed_tensors(hvd: ModuleType, waits: bool) -> None:
    forms = [((5, 2), torch.float32), ((3,), torch.int64), ((0, 4), torch.float64), ((9,), torch.float32)]
    every = [[contribution(rank, shape, dtype) for shape, dtype in forms] for rank in range(hvd.size())]
    given = every[hvd.rank()]
    if waits:
        results = hvd.grouped_reducescatter(given, op=hvd.Sum)
    else:
        results = hvd.synchronize(hvd.grouped_reducescatter_async(given, op=hvd.Sum))
    assert isinstance(results, list)
    for index, result in enumerate(results):
        same(result, mine_of(hvd, reduced(hvd.Sum, [tensors[index] for tensors in every])))


def test_sixteen_bit_averages_do_not_overflow(hvd: ModuleType) -> None:
    result = hvd.reducescatter(torch.full((hvd.size(), 10), 60000.0, dtype=torch.float16))
    assert bool((result == 60000.0).all())


def test_many_in_flight_in_any_order(hvd: ModuleType) -> None:
    numbers = list(range(12))
    handles = {
        number: hvd.reducescatter_async(torch.full((number + 1, 9), float(hvd.rank())), name=str(number), op=hvd.Sum)
        for number in (numbers if hvd.rank() % 2 else reversed(numbers))
    }
    for number in numbers:
        total = torch.full((number + 1, 9), float(sum(range(hvd.size()))))
        same(hvd.synchronize(handles[number]), mine_of(hvd, total))
