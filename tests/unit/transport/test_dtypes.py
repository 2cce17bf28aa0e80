"""The dtype table: bytes are viewed in place, and what cannot be viewed is refused with advice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import TABLE, check_movable, dtype_name, element_of, raw_view, storage_view

DTYPES = pytest.mark.parametrize("dtype", TABLE, ids=dtype_name)


@DTYPES
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (0, 4)], ids=str)
def test_raw_view_covers_every_byte(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    view = raw_view(tensor)
    assert view.dtype == np.uint8
    assert view.shape == (tensor.numel() * tensor.element_size(),)


@DTYPES
def test_writing_the_view_writes_the_tensor(dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    target = torch.zeros(5, dtype=dtype)
    raw_view(target)[:] = raw_view(source)
    assert torch.equal(target, source)


@DTYPES
def test_storage_view_has_one_entry_per_element(dtype: torch.dtype) -> None:
    view = storage_view(torch.zeros(2, 3, dtype=dtype))
    assert view.shape == (6,)
    assert view.dtype.itemsize == element_of(dtype).itemsize == dtype.itemsize


def test_views_of_leaves_that_require_grad() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    raw_view(torch.nn.Parameter(leaf))[:] = raw_view(torch.tensor([1.0, 2.0, 3.0]))
    assert leaf.tolist() == [1.0, 2.0, 3.0]


def test_a_view_keeps_the_memory_and_leaves_it_resizable() -> None:
    """FSDP lets go of what it has gathered so."""
    tensor = torch.ones(1000)
    view = raw_view(tensor)
    assert tensor.untyped_storage().resizable()
    del tensor
    assert view.view(np.float32).tolist() == [1.0] * 1000


@given(st.integers(0, 5), st.integers(0, 5))
def test_view_of_a_slice_is_the_slice(start: int, length: int) -> None:
    base = torch.arange(10, dtype=torch.bfloat16)
    raw_view(base[start : start + length])[:] = 0
    expected = torch.arange(10, dtype=torch.bfloat16)
    expected[start : start + length] = 0
    assert torch.equal(base, expected)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.uint16), "dtype uint16 cannot be communicated; expected one of: uint8, int8"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "dtype float8_e5m2"),
        (torch.zeros(2, 3).t(), r"got shape \(3, 2\) with strides \(1, 3\); call contiguous"),
        (torch.zeros(1).expand(3), "call contiguous"),
        (torch.zeros(2, device="meta"), "device meta; copy it with cpu"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo; convert it with to_dense"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else value[:20],
)
def test_refused_with_advice(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_movable(tensor)
