"""allreduce takes every size and every layout, also where the ranks' layouts differ."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    channels_last,
    chunk_shapes,
    contiguous,
    contribution,
    reduced,
    same,
    transposed,
    with_gaps,
)
from torch import Tensor

SMALLER = tuple(shape for shape in SHAPES if shape != (300, 301))


def expected_sum(hvd: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return reduced(hvd.Sum, [contribution(rank, shape, dtype, seed) for rank in range(hvd.size())])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_of_every_dtype(hvd: ModuleType, dtype: torch.dtype) -> None:
    for _ in range(2):
        inputs = [contribution(hvd.rank(), shape, dtype) for shape in SHAPES]
        handles = [hvd.allreduce_async(each, op=hvd.Sum) for each in inputs]
        for handle, shape in zip(handles, SHAPES, strict=True):
            same(hvd.synchronize(handle), expected_sum(hvd, shape, dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_sizes_around_a_chunk(hvd: ModuleType, dtype: torch.dtype) -> None:
    for shape in chunk_shapes(dtype):
        same(hvd.allreduce(contribution(hvd.rank(), shape, dtype), op=hvd.Sum), expected_sum(hvd, shape, dtype))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.bool, torch.complex64], ids=str)
def test_every_layout_out_of_place(hvd: ModuleType, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    shapes = [*SMALLER, (130, 1031)]
    inputs = [layout(contribution(hvd.rank(), shape, dtype)) for shape in shapes]
    handles = [hvd.allreduce_async(each, op=hvd.Sum) for each in inputs]
    for handle, given, shape in zip(handles, inputs, shapes, strict=True):
        same(hvd.synchronize(handle), expected_sum(hvd, shape, dtype))
        assert torch.equal(given, contribution(hvd.rank(), shape, dtype))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.bool, torch.complex64], ids=str)
def test_every_layout_in_place(hvd: ModuleType, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    shapes = [*SMALLER, (130, 1031)]
    inputs = [layout(contribution(hvd.rank(), shape, dtype)) for shape in shapes]
    strides = [each.stride() for each in inputs]
    results = hvd.grouped_allreduce_(inputs, op=hvd.Sum)
    for result, given, shape, stride in zip(results, inputs, shapes, strides, strict=True):
        assert result is given
        assert given.stride() == stride
        same(given, expected_sum(hvd, shape, dtype))


def test_gaps_between_the_elements_stay_as_they_were(hvd: ModuleType) -> None:
    room = torch.full((10,), 7.0)
    hvd.allreduce_(room[::2], op=hvd.Max)
    room[:5].fill_(3.0)
    hvd.allreduce_(room[5:], op=hvd.Sum)
    assert room.tolist() == [3.0] * 5 + [7.0 * hvd.size()] * 5


def test_the_layouts_of_the_ranks_may_differ(hvd: ModuleType) -> None:
    layouts = (contiguous, transposed, with_gaps, channels_last)
    for turn in range(len(layouts)):
        shape = (4, 3, 50, 60)
        mine = layouts[(hvd.rank() + turn) % len(layouts)](contribution(hvd.rank(), shape, torch.float32, turn))
        same(hvd.allreduce(mine, op=hvd.Sum), expected_sum(hvd, shape, torch.float32, turn))
        hvd.allreduce_(mine, op=hvd.Sum)
        same(mine, expected_sum(hvd, shape, torch.float32, turn))


def test_expanded_tensors_are_reduced_out_of_place(hvd: ModuleType) -> None:
    row = contribution(hvd.rank(), (1, 6), torch.float32)
    result = hvd.allreduce(row.expand(4, 6), op=hvd.Sum)
    same(result, expected_sum(hvd, (1, 6), torch.float32).expand(4, 6))
    result[0, 0] = 99  # the elements of the result are its own
    assert result[1, 0] != 99


def test_lazy_conjugates_and_negatives(hvd: ModuleType) -> None:
    values = contribution(hvd.rank(), (3, 4), torch.complex64)
    total = expected_sum(hvd, (3, 4), torch.complex64)
    same(hvd.allreduce(values.conj(), op=hvd.Sum), total.conj().resolve_conj())
    same(hvd.allreduce(values.conj().imag, op=hvd.Sum), -total.imag)
    lazy = values.clone().conj()
    hvd.allreduce_(lazy, op=hvd.Sum)
    same(lazy.resolve_conj(), total.conj().resolve_conj())


def test_in_inference_mode(hvd: ModuleType) -> None:
    with torch.inference_mode():
        mine = contribution(hvd.rank(), (7, 5), torch.float32)
        same(hvd.allreduce(mine, op=hvd.Sum), expected_sum(hvd, (7, 5), torch.float32))
        turned = transposed(mine) if hvd.rank() else mine.clone()
        hvd.allreduce_(turned, op=hvd.Sum)
        same(turned, expected_sum(hvd, (7, 5), torch.float32))
