"""The fusion buffer: small tensors are copied into one flat buffer, so that they cost one reduction instead of many.

    tensors     a b c   large   d
    reduced     [a b c d] [large]        one foreach copy in, one out

The shared backend needs no buffer for tensors of the dtype of the reduction: it gathers short tensors chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend, PreparedReduction, flat_of, phase
from hvlike.transport.loop.coroutine import Coroutine

SMALL_BYTES = 64 * 1024

SMALL_ON_DEVICE = 4 << 20  # On a GPU, where a copy costs less than one more call. Not measured yet.

_HOST = torch.device("cpu")

Reduce = Callable[[Sequence[torch.Tensor], Arithmetic], Coroutine[None]]


def small_ones(lengths: Sequence[int], itemsize: int, most: int = SMALL_BYTES) -> list[int]:
    """Which tensors of `lengths` elements to fuse: all below `most` bytes, if there are at least two."""
    small = [index for index, length in enumerate(lengths) if 0 < length * itemsize < most]
    return small if len(small) > 1 else []


class FusedViews:
    """Parts of a flat buffer for tensors of given shapes, in the order of elements that their strides give."""

    __slots__ = ("_views", "tensors")

    def __init__(self, buffer: torch.Tensor, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> None:
        """buffer: of the dtype to reduce in, flat; strides: dense, one for each shape."""
        self.tensors: list[torch.Tensor] = []  # What `gather` and `scatter` copy from and to; of any dtype
        self._views: list[torch.Tensor] = []
        start = 0
        for shape, stride in zip(shapes, strides, strict=True):
            view = buffer.as_strided(shape, stride, start)
            self._views.append(view)
            start += view.numel()

    def gather(self) -> None:
        torch._foreach_copy_(self._views, self.tensors)

    def scatter(self) -> None:
        try:
            torch._foreach_copy_(self.tensors, self._views)
        except RuntimeError:
            # It does not write lazy conjugates and negatives. To look for them costs more than they are worth.
            for target, source in zip(self.tensors, self._views, strict=True):
                target.copy_(source)


class CastReduction:
    """A PreparedReduction of tensors that travel as another dtype: in a buffer of it, into and out of which copies
    convert them.
    """

    def __init__(self, reduction: PreparedReduction, buffer: torch.Tensor, views: FusedViews) -> None:
        """reduction: of the buffer alone; views: of the buffer, one for each tensor."""
        self._reduction = reduction
        self._buffer = buffer
        self._views = views

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        self._views.tensors = list(tensors)
        # In inference mode any tensor may be written: one that requires a gradient, one that was made in it.
        with torch.inference_mode():
            self._views.gather()
        count = yield from self._reduction.run([self._buffer.data_ptr()], active, [self._buffer])
        with torch.inference_mode():
            self._views.scatter()
        self._views.tensors = []
        return count


class FusionBuffer:
    def __init__(self, most: int = SMALL_BYTES) -> None:
        """most: tensors of fewer bytes are packed."""
        self._most = most
        self._fits: tuple[tuple[int, ...], torch.dtype, torch.device] | None = None
        self._small: list[int] = []
        self._large: list[int] = []
        self._buffer = torch.empty(0, device="cpu")
        self._views = FusedViews(self._buffer, [], [])

    def allreduce(self, backend: Backend, flats: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        return self.reduce(backend, backend.allreduce, flats, arithmetic)

    def reduce(
        self, backend: Backend, reduce: Reduce, flats: Sequence[torch.Tensor], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Reduce flat tensors by `reduce`. backend: shows what takes time in the timeline."""
        lengths = tuple(map(len, flats))
        wanted = (lengths, arithmetic.dtype, flats[0].device if flats else _HOST)
        if wanted != self._fits:
            self._fit(*wanted)
            self._fits = wanted
        if not self._small:
            yield from reduce(flats, arithmetic)
            return
        views = self._views
        views.tensors = [flats[index] for index in self._small]
        with phase(backend, "MEMCPY_IN_FUSION_BUFFER", views.tensors):
            views.gather()
        yield from reduce([self._buffer, *(flats[index] for index in self._large)], arithmetic)
        with phase(backend, "MEMCPY_OUT_FUSION_BUFFER", views.tensors):
            views.scatter()
        views.tensors = []

    def _fit(self, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._small = small_ones(lengths, dtype.itemsize, self._most)
        packed = set(self._small)
        self._large = [index for index in range(len(lengths)) if index not in packed]
        shapes = [(lengths[index],) for index in self._small]
        # Kept for reductions in other threads, which may not be in the inference mode of this one.
        with torch.inference_mode(False):
            self._buffer = torch.empty(sum(length for (length,) in shapes), dtype=dtype, device=device)
            self._views = FusedViews(self._buffer, shapes, [(1,)] * len(shapes))


class PackedReduction:
    """A PreparedReduction by what a backend does with any tensors: the small ones go through a buffer."""

    def __init__(self, backend: Backend, reduce: Reduce, arithmetic: Arithmetic, most: int = SMALL_BYTES) -> None:
        """backend: counts. reduce: what reduces flat tensors on it."""
        self._backend = backend
        self._reduce = reduce
        self._arithmetic = arithmetic
        self._packer = FusionBuffer(most)

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        # First, so that a rank that fails in its work has been counted: the others end their step.
        count = 0 if active is None else (yield from self._backend.count_active(active))
        yield from self._packer.reduce(self._backend, self._reduce, list(map(flat_of, tensors)), self._arithmetic)
        return count
