"""Packing the tensors of a bucket into one buffer per dtype, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, Prepared, phase
from hvlike.backends.cuda.device_jobs import home_of
from hvlike.backends.fusion_buffer import SMALL_BYTES, SMALL_ON_DEVICE, FusedViews, small_ones
from hvlike.collectives.requests.reduction import Operand, is_dense, row_by_row
from hvlike.transport.loop.coroutine import Coroutine


def pick(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that gives these items of a list, as a tuple: pick([2, 0])("abc") -> ("c", "a")."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: tuple(items[index] for index in indices)


Strides = tuple[int, ...] | None
_shape: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")
_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_nbytes: Callable[[torch.Tensor], int] = attrgetter("nbytes")
_layout: Callable[[torch.Tensor], torch.layout] = attrgetter("layout")
_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
_by_rows, _stride, _address = torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.data_ptr
_is_negative, _is_conjugate = torch.Tensor.is_neg, torch.Tensor.is_conj


class BucketPacker:
    """Reduces one list of tensors over and over, all in one dtype. Used in the loop.

    Memory: none where the backend prepares a reduction of the tensors where they lie. Elsewhere a buffer as large as
    the small ones are together, and a copy of each tensor whose memory cannot be reduced in place (another dtype or
    order of elements than agreed).
    """

    def __init__(self, strides: Sequence[Strides], arithmetic: Arithmetic, *, casts: bool = False) -> None:
        """strides: agreed for each tensor, None for row by row; casts: some are of another dtype than the reduction."""
        self._agreed = list(strides)
        self._arithmetic = arithmetic
        self._casts = casts
        self._reduction: Prepared | None = None
        self._pick_rows = self._pick_ordered = pick([])
        self._orders: list[Strides] = []
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] | None = None
        self._strides: list[Strides] = []
        self._large: list[int] = []
        self._pick_small: Callable[[Sequence[Any]], tuple[Any, ...]] = pick([])
        self._bundle: FusedViews | None = None
        self._buffer = torch.empty(0, device="cpu")

    @property
    def prepared(self) -> Prepared | None:
        """What reduces the tensors where they lie, none of them empty; None where another way is taken."""
        return self._reduction if len(self._large) == len(self._sizes) else None

    def prepare(self, backend: Backend, tensors: Sequence[torch.Tensor]) -> bool:
        """Decide how tensors of these shapes are reduced; True where they are reduced where they lie."""
        shapes = list(map(_shape, tensors))
        if shapes != self._shapes:
            self._lay_out(shapes, backend)
        return self._reduction is not None

    def allreduce(self, backend: Backend, tensors: Sequence[torch.Tensor], *, active: bool) -> Coroutine[int]:
        """Reduce dense tensors in place; the same shapes, and the same backend every time, on every rank.

        Returns how many ranks are active, where `prepare` has returned True; else 0.
        """
        self.prepare(backend, tensors)
        if self._reduction is not None and self.fits(tensors):
            filled = tensors if len(self._large) == len(tensors) else [tensors[index] for index in self._large]
            return (yield from self._in_memory(backend, self._reduction, filled, active))
        dtype, home, count = self._arithmetic.dtype, home_of(backend), 0
        operands = [Operand(tensors[index], self._strides[index], dtype, home) for index in self._large]
        flats = [operand.flat for operand in operands]
        if self._reduction is not None:
            count = yield from self._in_memory(backend, self._reduction, flats, active)
        elif self._bundle is None:
            yield from backend.allreduce(flats, self._arithmetic)
        else:
            self._bundle.tensors = list(self._pick_small(tensors))
            yield from self._through_buffer(backend, self._bundle, flats)
            self._bundle.tensors = []
        for operand in operands:
            operand.write_back()
        return count

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all lie in host memory as agreed. Asked in every step: no Python for each tensor."""
        arithmetic = self._arithmetic
        return (
            all(map(is_, map(_layout, tensors), repeat(torch.strided)))
            and all(map(is_, map(_dtype, tensors), repeat(arithmetic.dtype)))
            and list(map(_nbytes, tensors)) == self._sizes
            and all(map(_on_host, tensors))
            and all(map(_by_rows, self._pick_rows(tensors)))
            and list(map(_stride, self._pick_ordered(tensors))) == self._orders
            and not any(map(_is_negative, tensors))
            and not (arithmetic.dtype.is_complex and any(map(_is_conjugate, tensors)))
        )

    def _in_memory(
        self, backend: Backend, reduction: Prepared, tensors: Sequence[torch.Tensor], active: bool
    ) -> Coroutine[int]:
        with phase(backend, "IN_MEMORY_ALLREDUCE", tensors):
            return (yield from reduction.run(list(map(_address, tensors)), active, tensors))

    def _through_buffer(self, backend: Backend, bundle: FusedViews, flats: Sequence[torch.Tensor]) -> Coroutine[None]:
        # In inference mode any tensor may be written: one that requires a gradient, one that was made in it.
        with phase(backend, "MEMCPY_IN_FUSION_BUFFER", bundle.tensors), torch.inference_mode():
            bundle.gather()
        yield from backend.allreduce([self._buffer, *flats], self._arithmetic)
        with phase(backend, "MEMCPY_OUT_FUSION_BUFFER", bundle.tensors), torch.inference_mode():
            bundle.scatter()

    def _lay_out(self, shapes: list[torch.Size], backend: Backend) -> None:
        self._shapes = shapes
        home = home_of(backend)
        self._strides = [
            strides if strides is not None and _can_have(shape, strides) else None
            for shape, strides in zip(shapes, self._agreed, strict=True)
        ]
        ordered = [index for index, strides in enumerate(self._strides) if strides is not None]
        self._pick_rows = pick([index for index, strides in enumerate(self._strides) if strides is None])
        self._pick_ordered = pick(ordered)
        self._orders = [self._strides[index] for index in ordered]
        lengths = [shape.numel() for shape in shapes]
        itemsize = self._arithmetic.itemsize
        self._sizes = [length * itemsize for length in lengths]
        filled = [length for length in lengths if length]
        self._reduction = None if self._casts or not filled else backend.prepare(filled, self._arithmetic)
        small: list[int] = []
        if self._reduction is None:
            small = small_ones(lengths, itemsize, SMALL_BYTES if home is None else SMALL_ON_DEVICE)
        self._large = [index for index, length in enumerate(lengths) if length and index not in set(small)]
        self._pick_small = pick(small)
        # Kept for steps in other threads, which may not be in the inference mode of this one.
        with torch.inference_mode(False):
            total = sum(lengths[index] for index in small)
            self._buffer = torch.empty(total, dtype=self._arithmetic.dtype, device=home or "cpu")
            strides = [self._strides[index] or row_by_row(shapes[index]) for index in small]
            self._bundle = FusedViews(self._buffer, [shapes[index] for index in small], strides) if small else None


def _can_have(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the agreed order is one of a tensor of this shape; a parameter may have got another shape since."""
    return len(shape) == len(strides) and is_dense(shape, strides)
