"""Flattening small tensors together, so that they cost one copy and one chunk instead of one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend
from hvlike.backends.tracing import phase
from hvlike.transport.loop.coroutine import Coroutine

SMALL_BYTES = 64 * 1024
"""Tensors below this many bytes are packed; a larger one is worth chunks of its own."""

_HOST = torch.device("cpu")


SMALL_ON_DEVICE = 4 << 20
"""The same on a GPU, whose memory is so fast that a copy costs less than one more call. Not measured yet."""


def small_ones(lengths: Sequence[int], itemsize: int, most: int = SMALL_BYTES) -> list[int]:
    """Which tensors of `lengths` elements to pack: all below `most` bytes, if there are at least two."""
    small = [index for index, length in enumerate(lengths) if 0 < length * itemsize < most]
    return small if len(small) > 1 else []


class FusionBuffer:
    """Packs the small ones of flat tensors into one buffer, which it keeps for the next time."""

    def __init__(self) -> None:
        self._lengths: tuple[int, ...] = ()
        self._dtype: torch.dtype | None = None
        self._small: list[int] = []
        self._large: list[int] = []
        self._buffer = torch.empty(0, device="cpu")
        self._views: list[torch.Tensor] = []

    def allreduce(self, plane: Backend, flats: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce flat contiguous tensors of one dtype and device in place, the small ones together."""
        self._fit(tuple(len(flat) for flat in flats), arithmetic.dtype, flats[0].device if flats else _HOST)
        if not self._small:
            yield from plane.allreduce(flats, arithmetic)
            return
        small = [flats[index] for index in self._small]
        with phase(plane, "MEMCPY_IN_FUSION_BUFFER", small):
            torch._foreach_copy_(self._views, small)
        yield from plane.allreduce([self._buffer, *(flats[index] for index in self._large)], arithmetic)
        with phase(plane, "MEMCPY_OUT_FUSION_BUFFER", small):
            torch._foreach_copy_(small, self._views)

    def _fit(self, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if lengths == self._lengths and dtype is self._dtype and device == self._buffer.device:
            return
        self._lengths, self._dtype = lengths, dtype
        self._small = small_ones(lengths, dtype.itemsize)
        packed = set(self._small)
        self._large = [index for index in range(len(lengths)) if index not in packed]
        sizes = [lengths[index] for index in self._small]
        # Kept for reductions in other threads, which may not be in the inference mode of this one.
        with torch.inference_mode(False):
            self._buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        self._views = list(torch.split(self._buffer, sizes)) if sizes else []
