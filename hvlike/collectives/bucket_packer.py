"""Reducing the tensors of a bucket, as they are: small ones through one buffer, large ones in their own memory.

The buffer is seen through views that have the shape of each small tensor and the agreed order of its elements. So
one call brings all of them in, whatever their layout, and one brings them back; nothing is made anew from step to
step. A buffer of another dtype casts on the way: that is how gradients travel as 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from hvlike.collectives.operand import Operand, is_dense, row_by_row
from hvlike.collectives.picking import pick
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.packing import small_ones
from hvlike.planes.plane import Plane
from hvlike.planes.traced import phase
from hvlike.transport.routine import Routine

Strides = tuple[int, ...] | None
_shape: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")


class BucketPacker:
    """Reduces one list of tensors over and over, all in one dtype. Used in the loop.

    Memory: one buffer as large as the small tensors together, and a copy of each large one whose memory cannot be
    reduced in place (another dtype or order of elements than agreed).
    """

    def __init__(self, strides: Sequence[Strides], arithmetic: Arithmetic) -> None:
        """strides: the agreed order in memory of each tensor, None for row by row."""
        self._agreed = list(strides)
        self._arithmetic = arithmetic
        self._shapes: list[torch.Size] | None = None
        self._strides: list[Strides] = []
        self._large: list[int] = []
        self._pick_small: Callable[[Sequence[Any]], tuple[Any, ...]] = pick([])
        self._buffer = torch.empty(0)
        self._views: list[torch.Tensor] = []

    def allreduce(self, plane: Plane, tensors: Sequence[torch.Tensor]) -> Routine[None]:
        """Reduce dense tensors in place; the same shapes on every rank."""
        shapes = list(map(_shape, tensors))
        if shapes != self._shapes:
            self._lay_out(shapes)
        dtype = self._arithmetic.dtype
        operands = [Operand(tensors[index], self._strides[index], dtype) for index in self._large]
        flats = [operand.flat for operand in operands]
        if not self._views:
            yield from plane.allreduce(flats, self._arithmetic)
        else:
            small = self._pick_small(tensors)
            # In inference mode any tensor may be written: one that requires a gradient, one that was made in it.
            with phase(plane, "MEMCPY_IN_FUSION_BUFFER", small), torch.inference_mode():
                torch._foreach_copy_(self._views, small)
            yield from plane.allreduce([self._buffer, *flats], self._arithmetic)
            with phase(plane, "MEMCPY_OUT_FUSION_BUFFER", small), torch.inference_mode():
                _write(small, self._views)
        for operand in operands:
            operand.write_back()

    def _lay_out(self, shapes: list[torch.Size]) -> None:
        self._shapes = shapes
        self._strides = [
            strides if strides is not None and _fits(shape, strides) else None
            for shape, strides in zip(shapes, self._agreed, strict=True)
        ]
        lengths = [shape.numel() for shape in shapes]
        dtype = self._arithmetic.dtype
        small = small_ones(lengths, dtype.itemsize)
        packed = set(small)
        self._large = [index for index, length in enumerate(lengths) if length and index not in packed]
        self._pick_small = pick(small)
        self._views = []
        # Kept for steps in other threads, which may not be in the inference mode of this one.
        with torch.inference_mode(False):
            self._buffer = torch.empty(sum(lengths[index] for index in small), dtype=dtype)
            start = 0
            for index in small:
                strides = self._strides[index] or row_by_row(shapes[index])
                self._views.append(self._buffer.as_strided(shapes[index], strides, start))
                start += lengths[index]


def _write(targets: tuple[torch.Tensor, ...], sources: list[torch.Tensor]) -> None:
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:
        # It does not write lazy conjugates and negatives; to look for them costs more than they are worth.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _fits(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the agreed order is one of a tensor of this shape; a parameter may have got another shape since."""
    return len(shape) == len(strides) and is_dense(shape, strides)
