"""What collectives promise beside the values of the model: rounding, range, not-a-numbers, equal bits, defaults."""

import math
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import contribution, same

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.controller.operations import even_rows


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_an_integer_average_truncates_toward_zero(hvd: ModuleType, dtype: torch.dtype) -> None:
    mine = torch.tensor([1, -1, 5, -5], dtype=dtype) if hvd.rank() == 0 else torch.zeros(4, dtype=dtype)
    expected = [math.trunc(value / hvd.size()) for value in (1, -1, 5, -5)]
    assert hvd.allreduce(mine).tolist() == expected


def test_scaled_integers_truncate_toward_zero_at_each_step(hvd: ModuleType) -> None:
    mine = torch.tensor([1, 2, 3, -3])
    total = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5)
    assert total.tolist() == [0, hvd.size(), hvd.size(), -hvd.size()]


@pytest.mark.parametrize(("dtype", "largest"), [(torch.uint8, 255), (torch.int8, 127), (torch.int16, 32767)], ids=str)
def test_an_average_of_narrow_integers_does_not_overflow(hvd: ModuleType, dtype: torch.dtype, largest: int) -> None:
    mine = torch.full((9,), largest, dtype=dtype)
    assert hvd.allreduce(mine).tolist() == [largest] * 9
    assert hvd.allreduce_(mine).tolist() == [largest] * 9


def test_an_average_of_float16_does_not_overflow(hvd: ModuleType) -> None:
    mine = torch.full((4,), 40000.0, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(mine), mine)


def test_sums_of_16_bit_floats_are_rounded_once(hvd: ModuleType) -> None:
    if hvd.cross_size() > 1 or not hvd.is_homogeneous():
        pytest.skip("several nodes: rounded once on each node and once across")
    # One after the other in bfloat16, 256 + 1 + 1 + 1 would stay 256.
    mine = torch.tensor([256.0 if hvd.rank() == 0 else 1.0], dtype=torch.bfloat16)
    expected = torch.tensor([256.0 + hvd.size() - 1], dtype=torch.bfloat16)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), expected)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=["min", "max"])
def test_nan_on_one_rank_reaches_all(hvd: ModuleType, op: ReduceOp) -> None:
    mine = torch.tensor([float("nan") if hvd.rank() == hvd.size() - 1 else 1.0, 2.0])
    result = hvd.allreduce(mine, op=op)
    assert math.isnan(result[0])
    assert result[1] == 2


def test_the_deprecated_average_argument_still_works(hvd: ModuleType) -> None:
    mine = torch.ones(3)
    for average, expected in ((True, 1.0), (False, float(hvd.size()))):
        with pytest.warns(DeprecationWarning, match="has been replaced with `op`") as seen:
            result = hvd.allreduce(mine, average=average)
        assert result.tolist() == [expected] * 3
        assert seen[0].filename == __file__


def test_all_ranks_hold_the_same_bits(hvd: ModuleType) -> None:
    # Sums of such numbers depend on the order of the summands in their last bits.
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(hvd.rank())) / 3
    total = hvd.allreduce(values)
    assert torch.equal(total, hvd.broadcast(total, root_rank=0))


def test_expanded_tensors_are_reduced_out_of_place(hvd: ModuleType) -> None:
    row = contribution(hvd.rank(), (1, 6), torch.float32)
    result = hvd.allreduce(row.expand(4, 6), op=hvd.Sum)
    rows = [contribution(rank, (1, 6), torch.float32) for rank in range(hvd.size())]
    same(result, sum(rows).expand(4, 6))
    result[0, 0] = 99  # the elements of the result are its own
    assert result[1, 0] != 99


def test_the_bits_of_nan_arrive_unchanged(hvd: ModuleType) -> None:
    payload = torch.tensor([0x7FC01234 + hvd.rank(), -1], dtype=torch.int32)
    arrived = hvd.broadcast(payload.view(torch.float32), root_rank=0).view(torch.int32)
    assert arrived.tolist() == [0x7FC01234, -1]


@pytest.mark.parametrize(
    ("total", "size", "rows"),
    [(5, 2, (3, 2)), (5, 3, (2, 2, 1)), (2, 4, (1, 1, 0, 0)), (0, 3, (0, 0, 0)), (8, 4, (2, 2, 2, 2)), (7, 1, (7,))],
)
def test_the_first_ranks_have_one_row_more(total: int, size: int, rows: tuple[int, ...]) -> None:
    assert even_rows(total, size) == rows


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


def test_sixteen_bit_averages_do_not_overflow(hvd: ModuleType) -> None:
    result = hvd.reducescatter(torch.full((hvd.size(), 10), 60000.0, dtype=torch.float16))
    assert bool((result == 60000.0).all())
