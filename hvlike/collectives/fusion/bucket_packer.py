"""Packing the tensors of a bucket into one buffer per dtype, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, Prepared
from hvlike.backends.cuda.device_jobs import home_of
from hvlike.backends.fusion_buffer import SMALL_BYTES, SMALL_ON_DEVICE, FusedViews, small_ones
from hvlike.backends.tracing import phase
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
_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
_by_rows, _stride, _address = torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.data_ptr
_is_negative, _is_conjugate = torch.Tensor.is_neg, torch.Tensor.is_conj


class BucketPacker:
    """Reduces one list of tensors over and over, all in one dtype. Used in the loop.

    Memory: none where the plane takes small tensors as they are, a chunk where it takes bundles, else a buffer as large
    as they are together; and a copy of each tensor whose memory cannot be reduced in place (another dtype or order of
    elements than agreed).
    """

    def __init__(self, strides: Sequence[Strides], arithmetic: Arithmetic, *, casts: bool = False) -> None:
        """strides: the agreed order in memory of each tensor, None for row by row.

        casts: some tensors are of another dtype than that of the reduction, on all ranks.
        """
        self._agreed = list(strides)
        self._arithmetic = arithmetic
        self._casts = casts
        self._repeating: Prepared | None = None
        self._pick_rows = self._pick_ordered = pick([])
        self._orders: list[Strides] = []
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] | None = None
        self._strides: list[Strides] = []
        self._large: list[int] = []
        self._pick_small: Callable[[Sequence[Any]], tuple[Any, ...]] = pick([])
        self._bundles: list[tuple[FusedViews, slice]] = []
        self._whole = torch.empty(0, device="cpu")

    def allreduce(self, plane: Backend, tensors: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Reduce dense tensors in place; the same shapes, and the same plane every time, on every rank."""
        if self._repeating is not None and self._are_plain(tensors):
            filled = tensors if len(self._large) == len(tensors) else [tensors[index] for index in self._large]
            yield from self._in_memory(plane, self._repeating, filled)
            return
        shapes = list(map(_shape, tensors))
        home = home_of(plane)
        if shapes != self._shapes:
            self._lay_out(shapes, plane, home)
        dtype = self._arithmetic.dtype
        operands = [Operand(tensors[index], self._strides[index], dtype, home) for index in self._large]
        flats = [operand.flat for operand in operands]
        if self._repeating is not None:
            yield from self._in_memory(plane, self._repeating, flats)
        elif not self._bundles:
            yield from plane.allreduce(flats, self._arithmetic)
        else:
            small = self._pick_small(tensors)
            for bundle, part in self._bundles:
                bundle.tensors = list(small[part])
            yield from self._through_buffer(plane, flats)
            for bundle, _ in self._bundles:
                bundle.tensors = []
        for operand in operands:
            operand.write_back()

    def _are_plain(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all lie in host memory as they were agreed. Asked in every step: no Python for each tensor."""
        arithmetic = self._arithmetic
        return (
            list(map(_nbytes, tensors)) == self._sizes
            and all(map(is_, map(_dtype, tensors), repeat(arithmetic.dtype)))
            and all(map(_on_host, tensors))
            and all(map(_by_rows, self._pick_rows(tensors)))
            and list(map(_stride, self._pick_ordered(tensors))) == self._orders
            and not any(map(_is_negative, tensors))
            and not (arithmetic.dtype.is_complex and any(map(_is_conjugate, tensors)))
        )

    def _in_memory(self, plane: Backend, repeating: Prepared, tensors: Sequence[torch.Tensor]) -> Coroutine[None]:
        with phase(plane, "IN_MEMORY_ALLREDUCE", tensors):
            yield from repeating.run(list(map(_address, tensors)), True, tensors)

    def _through_buffer(self, plane: Backend, flats: Sequence[torch.Tensor]) -> Coroutine[None]:
        ((bundle, _),) = self._bundles
        # In inference mode any tensor may be written: one that requires a gradient, one that was made in it.
        with phase(plane, "MEMCPY_IN_FUSION_BUFFER", bundle.tensors), torch.inference_mode():
            bundle.gather()
        yield from plane.allreduce([self._whole, *flats], self._arithmetic)
        with phase(plane, "MEMCPY_OUT_FUSION_BUFFER", bundle.tensors), torch.inference_mode():
            bundle.scatter()

    def _lay_out(self, shapes: list[torch.Size], plane: Backend, home: torch.device | None) -> None:
        self._shapes = shapes
        self._strides = [
            strides if strides is not None and _fits(shape, strides) else None
            for shape, strides in zip(shapes, self._agreed, strict=True)
        ]
        ordered = [index for index, strides in enumerate(self._strides) if strides is not None]
        self._pick_rows = pick([index for index, strides in enumerate(self._strides) if strides is None])
        self._pick_ordered = pick(ordered)
        self._orders = [self._strides[index] for index in ordered]
        lengths = [shape.numel() for shape in shapes]
        self._sizes = [length * self._arithmetic.itemsize for length in lengths]
        filled = [length for length in lengths if length]
        self._repeating = None if self._casts or not filled else plane.prepare(filled, self._arithmetic)
        itemsize = self._arithmetic.itemsize
        small = small_ones(lengths, itemsize, SMALL_BYTES if home is None else SMALL_ON_DEVICE)
        if self._repeating is not None:
            small = []
        packed = set(small)
        self._large = [index for index, length in enumerate(lengths) if length and index not in packed]
        self._pick_small = pick(small)
        parts = [(0, len(small))] if small else []
        # Kept for steps in other threads, which may not be in the inference mode of this one.
        with torch.inference_mode(False):
            self._whole = torch.empty(
                max((sum(lengths[index] for index in small[first:last]) for first, last in parts), default=0),
                dtype=self._arithmetic.dtype,
                device=home or "cpu",
            )
            self._bundles = [(self._bundle(small[first:last], shapes), slice(first, last)) for first, last in parts]

    def _bundle(self, members: Sequence[int], shapes: Sequence[torch.Size]) -> FusedViews:
        strides = [self._strides[index] or row_by_row(shapes[index]) for index in members]
        return FusedViews(self._whole, [shapes[index] for index in members], strides)


def _fits(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the agreed order is one of a tensor of this shape; a parameter may have got another shape since."""
    return len(shape) == len(strides) and is_dense(shape, strides)
