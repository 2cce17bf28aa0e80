"""All eight forms of allreduce give the reduction of all ranks' tensors, for every op and dtype, each twice."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import DTYPES, OPS, contribution, defined, reduced, same
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp

SHAPE = (5, 3)
CASES = [(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]


def names(case: object) -> str:
    return case.name.lower() if isinstance(case, ReduceOp) else str(case).removeprefix("torch.")


def out_of_place_forms(hvd: ModuleType) -> list[Callable[[list[Tensor], ReduceOp], Sequence[Tensor]]]:
    return [
        lambda tensors, op: [hvd.allreduce(each, op=op) for each in tensors],
        lambda tensors, op: [hvd.synchronize(each) for each in [hvd.allreduce_async(t, op=op) for t in tensors]],
        lambda tensors, op: hvd.grouped_allreduce(tensors, op=op),
        lambda tensors, op: hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=op)),
    ]


def in_place_forms(hvd: ModuleType) -> list[Callable[[list[Tensor], ReduceOp], Sequence[Tensor]]]:
    return [
        lambda tensors, op: [hvd.allreduce_(each, op=op) for each in tensors],
        lambda tensors, op: [hvd.synchronize(each) for each in [hvd.allreduce_async_(t, op=op) for t in tensors]],
        lambda tensors, op: hvd.grouped_allreduce_(tensors, op=op),
        lambda tensors, op: hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=op)),
    ]


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=names)
def test_out_of_place_forms_reduce_and_leave_the_input_alone(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    inputs = [contribution(hvd.rank(), SHAPE, dtype, seed) for seed in (1, 2)]
    before = [each.clone() for each in inputs]
    expected = [reduced(op, [contribution(rank, SHAPE, dtype, seed) for rank in range(hvd.size())]) for seed in (1, 2)]
    for form in out_of_place_forms(hvd):
        results = form(inputs, op)
        for result, wanted, given, was in zip(results, expected, inputs, before, strict=True):
            same(result, wanted)
            assert torch.equal(given, was)
            assert result.data_ptr() != given.data_ptr()


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=names)
def test_in_place_forms_write_into_the_given_storage(hvd: ModuleType, op: ReduceOp, dtype: torch.dtype) -> None:
    expected = [reduced(op, [contribution(rank, SHAPE, dtype, seed) for rank in range(hvd.size())]) for seed in (1, 2)]
    for form in in_place_forms(hvd):
        given = [contribution(hvd.rank(), SHAPE, dtype, seed) for seed in (1, 2)]
        places = [each.data_ptr() for each in given]
        results = form(given, op)
        for result, wanted, mine, place in zip(results, expected, given, places, strict=True):
            assert result is mine
            assert mine.data_ptr() == place
            same(mine, wanted)


def test_the_default_is_the_average(hvd: ModuleType) -> None:
    for value in (hvd.allreduce(torch.tensor(float(hvd.rank()))), hvd.allreduce_(torch.tensor(float(hvd.rank())))):
        same(value, torch.tensor((hvd.size() - 1) / 2))


def test_leaves_that_require_grad_are_reduced_in_place(hvd: ModuleType) -> None:
    leaf = torch.nn.Parameter(torch.full((4,), float(hvd.rank())))
    assert hvd.allreduce_(leaf, op=hvd.Max) is leaf
    same(leaf.detach(), torch.full((4,), hvd.size() - 1.0))
    assert leaf.grad_fn is None


def test_all_ranks_hold_the_same_bits(hvd: ModuleType) -> None:
    # Sums of such numbers depend on the order of the summands in their last bits.
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(hvd.rank())) / 3
    total = hvd.allreduce(values)
    assert torch.equal(total, hvd.broadcast(total, root_rank=0))
