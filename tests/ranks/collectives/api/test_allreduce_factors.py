"""Factors and divisors: what is multiplied, in which type, and how it is rounded."""

import math
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import COMPLEX, FLOATS, INTEGERS, OPS, contribution, defined, reduced, same

from hvlike.backends.arithmetic.reduce_op import ReduceOp


def contributions(hvd: ModuleType, dtype: torch.dtype) -> list[torch.Tensor]:
    return [contribution(rank, (7, 3), dtype) for rank in range(hvd.size())]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_every_contribution_is_prescaled_and_the_result_postscaled(hvd: ModuleType, dtype: torch.dtype) -> None:
    ops = [op for op in OPS if defined(op, dtype)]
    for prescale, postscale in ((0.5, 1.0), (1.0, 2.0), (2.0, 0.5), (3, 1)):
        # Products of larger numbers would overflow before the postscale brings them back.
        inputs = [each.clip(max=1) if dtype in INTEGERS else each for each in contributions(hvd, dtype)]
        inputs = [each.clip(min=-1) if dtype in INTEGERS and dtype.is_signed else each for each in inputs]
        factors = {"prescale_factor": prescale, "postscale_factor": postscale}
        handles = [hvd.allreduce_async(inputs[hvd.rank()], op=op, **factors) for op in ops]
        for op, handle in zip(ops, handles, strict=True):
            same(hvd.synchronize(handle), reduced(op, inputs, prescale, postscale))


def test_all_forms_take_factors(hvd: ModuleType) -> None:
    inputs = contributions(hvd, torch.float32)
    mine, expected = inputs[hvd.rank()], reduced(hvd.Sum, inputs, 3.0, 0.5)
    factors = {"op": hvd.Sum, "prescale_factor": 3.0, "postscale_factor": 0.5}
    same(hvd.allreduce(mine, **factors), expected)
    same(hvd.allreduce_(mine.clone(), **factors), expected)
    same(hvd.synchronize(hvd.allreduce_async_(mine.clone(), **factors)), expected)
    for grouped in (
        hvd.grouped_allreduce([mine, mine], **factors),
        hvd.grouped_allreduce_([mine.clone(), mine.clone()], **factors),
        hvd.synchronize(hvd.grouped_allreduce_async([mine, mine], **factors)),
        hvd.synchronize(hvd.grouped_allreduce_async_([mine.clone(), mine.clone()], **factors)),
    ):
        for each in grouped:
            same(each, expected)


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
