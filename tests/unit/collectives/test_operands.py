"""How a tensor lies in memory, how it comes into the order of all ranks, and which are reduced where they lie."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.collectives.inputs import DTYPES, LAYOUTS, OPS, SHAPES, contribution, transposed
from torch import Tensor

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend, bytes_of
from hvlike.collectives.requests.collective_jobs import MOST_PREPARED, PlainAllreduces, is_plain
from hvlike.collectives.requests.reduction import (
    Adasum,
    Average,
    Operand,
    ScaledOp,
    Sum,
    is_dense,
    row_by_row,
    working_dtype,
)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (3, 0, 2), (1, 1), (4, 1, 2)])
def test_row_by_row(shape: tuple[int, ...]) -> None:
    assert row_by_row(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((), (), True),
        ((5,), (1,), True),
        ((5,), (2,), False),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (6, 2), False),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((2, 3), (1, 1), False),
        # The stride of a dimension of length one says nothing.
        ((1, 3), (77, 1), True),
        ((3, 1), (1, 0), True),
        # Where there is nothing, nothing is missing.
        ((3, 0, 2), (0, 2, 1), True),
        ((0,), (5,), True),
        # channels_last
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
        ((2, 3, 4, 5), (61, 1, 15, 3), False),
    ],
)
def test_is_dense(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_only_means_of_narrow_integers_are_computed_wider(op: ReduceOp) -> None:
    for dtype in DTYPES:
        wider = op is ReduceOp.AVERAGE and dtype in (torch.uint8, torch.int8, torch.int16)
        assert working_dtype(dtype, op) is (torch.int32 if wider else dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(layout: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    values = contribution(0, shape, torch.float32)
    tensor = layout(values)
    agreed = [None, tensor.stride()] if is_dense(shape, tensor.stride()) else [None]
    for strides in agreed:
        operand = Operand(tensor, strides)
        assert operand.flat.shape == (values.numel(),)
        if strides is None:
            assert torch.equal(operand.flat, values.reshape(-1))
        operand.flat += 1
        operand.write_back()
        values = values + 1
        assert torch.equal(tensor, values)


def test_a_single_element_with_an_odd_stride_is_flat() -> None:
    # It counts as contiguous; viewed as bytes it must have stride 1.
    for tensor in (torch.ones(2)[::2], torch.ones(4, 2)[::4, 1:], torch.empty(0, 4)[:, ::2]):
        assert tensor.is_contiguous()
        operand = Operand(tensor, None)
        assert operand.flat.stride() == (1,)
        assert operand.flat.data_ptr() == tensor.data_ptr()


def test_memory_is_shared_where_the_order_is_the_agreed_one() -> None:
    rows, turned = torch.ones(3, 4), transposed(torch.ones(3, 4))
    assert Operand(rows, None).flat.data_ptr() == rows.data_ptr()
    assert Operand(turned, turned.stride()).flat.data_ptr() == turned.data_ptr()
    assert Operand(turned, None).flat.data_ptr() != turned.data_ptr()
    assert Operand(rows, turned.stride()).flat.data_ptr() != rows.data_ptr()
    assert Operand(rows.int(), None, torch.int64).flat.dtype is torch.int64


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(6),
        lambda: torch.ones(6, 2)[:, 0],
        lambda: torch._neg_view(torch.ones(6)),
        lambda: torch.ones(6, dtype=torch.complex64).conj(),
        lambda: torch._neg_view(torch.ones(6, dtype=torch.complex64).conj()),
    ],
)
def test_what_is_begun_in_inference_mode_is_written_outside_of_it(
    make: Callable[[], torch.Tensor], inside: bool
) -> None:
    """Another thread may end an operation."""
    outside = None if inside else make()
    with torch.inference_mode():
        tensor = make() if outside is None else outside
        operand = Operand(tensor, None)
        flat = bytes_of(operand.flat)
    flat.copy_(bytes_of(torch.full((6,), 3.0 + 0j if tensor.is_complex() else 3.0, dtype=tensor.dtype)))
    operand.write_back()
    assert torch.equal(tensor.resolve_conj().resolve_neg(), torch.full_like(operand.flat, 3.0))


SUM = ScaledOp(Sum, 1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: torch.ones(3, 4), True),
        (lambda: torch.nn.Parameter(torch.ones(3)), True),
        (lambda: torch.ones(3, requires_grad=True), True),
        (lambda: torch.ones(4, 3)[1:3], True),
        (lambda: torch.ones(3, 4).t(), False),
        (lambda: torch.ones(6)[::2], False),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), False),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, False),
        (lambda: torch.ones(3, device="meta"), False),
    ],
)
def test_plain_is_what_lies_row_by_row_in_host_memory(make: Callable[[], torch.Tensor], plain: bool) -> None:
    assert is_plain(make()) is plain


def test_tensors_of_inference_mode_are_plain() -> None:
    with torch.inference_mode():
        assert is_plain(torch.ones(3))


class Preparing(SoloBackend):
    """Notes what it has prepared."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Any:
        self.lengths += lengths
        return self


def allreduces() -> tuple[PlainAllreduces, Preparing]:
    backend = Preparing()
    queue: Any = SimpleNamespace(backend=backend, group=SimpleNamespace(size=2))
    return PlainAllreduces(queue), backend


def test_each_kind_is_checked_and_prepared_once() -> None:
    plain, backend = allreduces()
    checks: list[int] = []
    for length in (5, 5, 7, 5):
        assert plain.job(torch.ones(length), SUM, lambda length=length: checks.append(length)) is not None
    assert checks == backend.lengths == [5, 7]


def test_what_a_check_refuses_is_asked_again() -> None:
    plain, backend = allreduces()

    def refuse() -> None:
        raise KeyError("refused")

    for _ in range(2):
        with pytest.raises(KeyError, match="refused"):
            plain.job(torch.ones(5), SUM, refuse)
    assert not backend.lengths


@pytest.mark.parametrize(
    ("tensor", "reduction"),
    [
        (torch.ones(0), SUM),
        (torch.ones(3), ScaledOp(Adasum, 1.0, 1.0)),
        (torch.ones(3, dtype=torch.int8), ScaledOp(Average, 1.0, 1.0)),
        (torch.ones(4, 3).t(), SUM),
    ],
)
def test_what_goes_through_a_copy_has_no_job_here(tensor: torch.Tensor, reduction: ScaledOp) -> None:
    plain, backend = allreduces()
    assert plain.job(tensor, reduction) is None
    assert not backend.lengths


def test_few_kinds_are_kept() -> None:
    plain, backend = allreduces()
    for length in range(1, MOST_PREPARED + 2):
        plain.job(torch.ones(length), SUM)
    plain.job(torch.ones(1), SUM)
    assert len(backend.lengths) == MOST_PREPARED + 2
