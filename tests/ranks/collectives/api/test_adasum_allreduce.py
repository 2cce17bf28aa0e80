"""op=Adasum in all eight forms of allreduce: the definition over a tree of the ranks, for each tensor by itself."""

import functools
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from support.adasum_reference import adasum
from support.collectives.inputs import FLOATS, LAYOUTS, contiguous
from torch import Tensor

from hvlike.errors import MismatchError, UsageError

pytestmark = pytest.mark.differs_by_ranks(2, 4)

SHAPES = ((5, 3), (), (0,), (1,), (2, 3, 4, 5), (300, 301))

Form = Callable[[ModuleType, list[Tensor]], Sequence[Tensor]]

FORMS: dict[str, Form] = {
    "allreduce": lambda hvd, tensors: [hvd.allreduce(each, op=hvd.Adasum) for each in tensors],
    "allreduce_": lambda hvd, tensors: [hvd.allreduce_(each, op=hvd.Adasum) for each in tensors],
    "allreduce_async": lambda hvd, tensors: [
        hvd.synchronize(each) for each in [hvd.allreduce_async(tensor, op=hvd.Adasum) for tensor in tensors]
    ],
    "allreduce_async_": lambda hvd, tensors: [
        hvd.synchronize(each) for each in [hvd.allreduce_async_(tensor, op=hvd.Adasum) for tensor in tensors]
    ],
    "grouped_allreduce": lambda hvd, tensors: hvd.grouped_allreduce(tensors, op=hvd.Adasum),
    "grouped_allreduce_": lambda hvd, tensors: hvd.grouped_allreduce_(tensors, op=hvd.Adasum),
    "grouped_allreduce_async": lambda hvd, tensors: hvd.synchronize(
        hvd.grouped_allreduce_async(tensors, op=hvd.Adasum)
    ),
    "grouped_allreduce_async_": lambda hvd, tensors: hvd.synchronize(
        hvd.grouped_allreduce_async_(tensors, op=hvd.Adasum)
    ),
}


@functools.cache
def drawn(rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Not to be changed."""
    generator = torch.Generator().manual_seed(100 * seed)
    common = torch.randn(shape, generator=generator)
    generator.manual_seed(100 * seed + rank + 1)
    return (rank + 1) * (common + torch.randn(shape, generator=generator))


def vector(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank puts in: vectors of different lengths that point in similar directions, as gradients do."""
    return drawn(rank, shape, seed).to(dtype, copy=True)


@functools.cache
def expected_of(ranks: range, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Not to be changed."""
    return adasum([vector(rank, shape, dtype, seed) for rank in ranks])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_follows_the_definition(hvd: ModuleType, form: str, dtype: torch.dtype) -> None:
    ranks = range(hvd.size())
    for _ in range(2):
        given = [vector(hvd.rank(), shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
        before = [each.clone() for each in given]
        results = FORMS[form](hvd, given)
        for seed, shape in enumerate(SHAPES):
            torch.testing.assert_close(results[seed], expected_of(ranks, shape, dtype, seed).to(dtype))
            if form.endswith("_"):
                assert results[seed] is given[seed]
            else:
                assert torch.equal(given[seed], before[seed])


def test_all_ranks_hold_the_same_bits(hvd: ModuleType) -> None:
    total = hvd.allreduce(vector(hvd.rank(), (70_001,), torch.float32), op=hvd.Adasum)
    assert torch.equal(total, hvd.broadcast(total, root_rank=0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_order_in_memory_also_one_that_differs_between_ranks(
    hvd: ModuleType, layout: Callable[[Tensor], Tensor]
) -> None:
    shape = (2, 3, 4, 5)
    expected = expected_of(range(hvd.size()), shape, torch.float32).float()
    for mine in (layout, layout if hvd.rank() % 2 else contiguous):
        given = mine(vector(hvd.rank(), shape, torch.float32))
        hvd.allreduce_(given, op=hvd.Adasum)
        torch.testing.assert_close(given, expected)


def test_factors_apply_before_and_after(hvd: ModuleType) -> None:
    mine = vector(hvd.rank(), (6,), torch.float64)
    result = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(result, 1.5 * expected_of(range(hvd.size()), (6,), torch.float64))


def test_equal_tensors_stay_and_zeros_change_nothing(hvd: ModuleType) -> None:
    values = torch.randn(9, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(hvd.allreduce(values, op=hvd.Adasum), values)
    mine = values if hvd.rank() == hvd.size() - 1 else torch.zeros(9)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Adasum), values)


def test_orthogonal_tensors_add_up(hvd: ModuleType) -> None:
    mine = torch.zeros(hvd.size())
    mine[hvd.rank()] = hvd.rank() + 1.0
    assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [rank + 1.0 for rank in range(hvd.size())]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_on_the_way(hvd: ModuleType, compression: str) -> None:
    mine = vector(hvd.rank(), (50,), torch.float32)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    result = hvd.allreduce(mine, op=hvd.Adasum, compression=getattr(hvd.Compression, compression))
    rounded = [vector(rank, (50,), torch.float32).to(wire) for rank in range(hvd.size())]
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, adasum(rounded).to(wire).float())


def test_mixed_dtypes_in_a_group(hvd: ModuleType) -> None:
    given = [vector(hvd.rank(), (7,), dtype, seed) for seed, dtype in enumerate(FLOATS)]
    results = hvd.grouped_allreduce(given, op=hvd.Adasum)
    for seed, (result, dtype) in enumerate(zip(results, FLOATS, strict=True)):
        torch.testing.assert_close(result, expected_of(range(hvd.size()), (7,), dtype, seed).to(dtype))


def test_next_to_other_reductions_in_flight(hvd: ModuleType) -> None:
    order = (0, 1, 2) if hvd.rank() % 2 else (2, 0, 1)
    handles = {}
    for number in order:
        op = (hvd.Adasum, hvd.Sum, hvd.Adasum)[number]
        mine = vector(hvd.rank(), (8,), torch.float64, number)
        handles[number] = hvd.allreduce_async(mine, name=f"mixed.{number}", op=op)
    ranks = range(hvd.size())
    for number in (0, 2):
        torch.testing.assert_close(hvd.synchronize(handles[number]), expected_of(ranks, (8,), torch.float64, number))
    total = sum(vector(rank, (8,), torch.float64, 1) for rank in ranks)
    torch.testing.assert_close(hvd.synchronize(handles[1]), total)


@pytest.mark.mpi(min_size=2)
def test_ops_that_differ_fail_on_every_rank(hvd: ModuleType) -> None:
    op = hvd.Adasum if hvd.rank() == 0 else hvd.Sum
    with pytest.raises(MismatchError, match=r"rank 0 passed Adasum, .* passed Sum"):
        hvd.allreduce(torch.ones(3), name="ops", op=op)
    assert hvd.allreduce(torch.ones(3), op=hvd.Adasum).tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_dtypes_without_dot_products_are_refused(hvd: ModuleType, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=r"allreduce 'w' .*expected float16, bfloat16, float32 or float64"):
        hvd.allreduce(torch.ones(2).to(dtype), name="w", op=hvd.Adasum)
    hvd.barrier()


def test_there_is_no_derivative_and_backward_says_so(hvd: ModuleType) -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = hvd.allreduce(leaf, op=hvd.Adasum)
    with pytest.raises(UsageError, match=r"op=hvd.Adasum has no derivative.*tensor.detach\(\)"):
        result.sum().backward()
    assert leaf.grad is None


def test_in_inference_mode_whichever_thread_goes_on(hvd: ModuleType) -> None:
    with torch.inference_mode():
        for number in range(10):
            inputs = [torch.full((1000,), hvd.rank() + 1.0), torch.full((3,), 1.0)]
            handle = hvd.grouped_allreduce_async(inputs, op=hvd.Adasum)
            if number % 2:
                # The loop's own thread, which is not in inference mode, has time to begin.
                time.sleep(0.005)
            first, second = hvd.synchronize(handle)
            assert float(first.std()) == 0
            assert second.tolist() == [1.0] * 3
