"""All four forms of broadcast give every rank the root's tensor, for every dtype, size, layout and root."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    chunk_shapes,
    contiguous,
    contribution,
    same,
    transposed,
    with_gaps,
)
from torch import Tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_of_every_dtype_from_every_root(hvd: ModuleType, dtype: torch.dtype) -> None:
    inputs = [contribution(hvd.rank(), shape, dtype) for shape in SHAPES]
    for root in range(hvd.size()):
        handles = [hvd.broadcast_async(each, root) for each in inputs]
        for handle, shape in zip(handles, SHAPES, strict=True):
            assert torch.equal(hvd.synchronize(handle), contribution(root, shape, dtype))
    for given, shape in zip(inputs, SHAPES, strict=True):
        assert torch.equal(given, contribution(hvd.rank(), shape, dtype))


def test_all_forms_twice(hvd: ModuleType) -> None:
    root, shape = hvd.size() - 1, (33, 5)
    expected = contribution(root, shape, torch.float32)
    for _ in range(2):
        given = contribution(hvd.rank(), shape, torch.float32)
        out = hvd.broadcast(given, root_rank=root)
        assert out.data_ptr() != given.data_ptr()
        assert torch.equal(out, expected)
        assert torch.equal(given, contribution(hvd.rank(), shape, torch.float32))
        assert hvd.broadcast_(given, root_rank=root) is given
        assert torch.equal(given, expected)
        other = contribution(hvd.rank(), shape, torch.float32)
        assert hvd.synchronize(hvd.broadcast_async_(other, root_rank=root)) is other
        assert torch.equal(other, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_sizes_around_a_chunk(hvd: ModuleType, dtype: torch.dtype) -> None:
    root = hvd.size() // 2
    for shape in chunk_shapes(dtype):
        assert torch.equal(
            hvd.broadcast(contribution(hvd.rank(), shape, dtype), root), contribution(root, shape, dtype)
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_in_place(hvd: ModuleType, layout: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.int16, torch.complex64):
        given = [layout(contribution(hvd.rank(), shape, dtype)) for shape in SHAPES]
        strides = [each.stride() for each in given]
        for handle in [hvd.broadcast_async_(each, root_rank=0) for each in given]:
            hvd.synchronize(handle)
        assert [each.stride() for each in given] == strides
        for each, shape in zip(given, SHAPES, strict=True):
            same(each, contribution(0, shape, dtype))


def test_the_layouts_of_the_ranks_may_differ(hvd: ModuleType) -> None:
    layouts = (contiguous, transposed, with_gaps)
    for root in range(hvd.size()):
        mine = layouts[hvd.rank() % 3](contribution(hvd.rank(), (6, 7, 8), torch.float32))
        assert torch.equal(hvd.broadcast_(mine, root), contribution(root, (6, 7, 8), torch.float32))


def test_the_bits_of_nan_arrive_unchanged(hvd: ModuleType) -> None:
    payload = torch.tensor([0x7FC01234 + hvd.rank(), -1], dtype=torch.int32)
    arrived = hvd.broadcast(payload.view(torch.float32), root_rank=0).view(torch.int32)
    assert arrived.tolist() == [0x7FC01234, -1]
