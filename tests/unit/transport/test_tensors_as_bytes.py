"""Tensors as bytes: viewed in place where they have memory of their own, and refused with advice where not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.without_memory import IN_PLACE, KINDS, Named, Wrapper
from torch import Tensor

from hvlike.errors import ProcessGroupError, UsageError
from hvlike.transport.memory.dtypes import (
    TABLE,
    bytes_at,
    bytes_of,
    check_movable,
    dtype_name,
    element_of,
    raw_view,
    runs_at,
    storage_view,
)
from hvlike.transport.memory.own_memory import check_memory, first_without, has_memory

DTYPES = pytest.mark.parametrize("dtype", TABLE, ids=dtype_name)


@DTYPES
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (0, 4)], ids=str)
def test_the_raw_view_is_every_byte_of_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source, target = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    view = raw_view(target)
    assert view.dtype == np.uint8
    assert view.shape == (target.numel() * target.element_size(),)
    view[:] = raw_view(source)
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


PLAIN: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.ones(3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "subclass": lambda: torch.ones(3).as_subclass(Named),
    "empty": lambda: torch.ones(0, 3),
    "scalar": lambda: torch.tensor(1.0),
    "view": lambda: torch.ones(4, 4)[1:, ::2],
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "of numpy": lambda: torch.from_numpy(np.ones(3)),
    "shared": lambda: torch.ones(3).share_memory_(),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
    "requires grad": lambda: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_tensors_have_memory(make: Callable[[], Tensor]) -> None:
    assert has_memory(make())
    assert first_without([make(), [make()]]) is None


@pytest.mark.filterwarnings("ignore")  # What torch warns of in torch.func, and of nested tensors
@pytest.mark.parametrize("kind", (KINDS | IN_PLACE).values(), ids=KINDS | IN_PLACE)
def test_others_are_refused(kind: tuple[Callable[[Callable[[Tensor], Any]], Any], str]) -> None:
    hand, named = kind
    refused: list[str] = []
    plain = torch.ones(2)

    def use(tensor: Tensor) -> Tensor:
        assert not has_memory(tensor)
        assert first_without([plain, [tensor]]) is tensor
        with pytest.raises(ProcessGroupError) as raised:
            check_memory("send 'x'", tensor, ProcessGroupError)
        refused.append(str(raised.value))
        return tensor.sum() if named == "one of torch.func" else tensor

    hand(use)
    assert f"send 'x': expected a tensor with memory of its own, got {named}" in refused[0]


def test_a_subclass_does_not_answer_for_what_it_wraps() -> None:
    class Talkative(Wrapper):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.data_ptr:
                return args[0].inner.data_ptr()
            return super().__torch_function__(function, types, args, kwargs or {})

    wrapper = Talkative(torch.ones(3))
    assert wrapper.data_ptr()
    assert not has_memory(wrapper)


def test_no_bytes_are_viewed_where_there_are_none() -> None:
    for view in (
        lambda: bytes_at(0, 8),
        lambda: bytes_of(torch._efficientzerotensor((3,))),
        lambda: runs_at([4096, 0], [(0, 0, 8), (1, 0, 8)]),
    ):
        with pytest.raises(UsageError, match="without an address"):
            view()
    assert not bytes_at(0, 0).size
    assert not bytes_of(torch.ones(0)).size
    assert not runs_at([0], [])
