"""How dense tensors travel: a row of numbers each, and of every storage the bytes that are used, once.

Of a storage the one span of bytes goes out that holds all its tensors of this message; nothing is copied for it.
Strides, and which tensors share memory, survive. The exception: where the span is more than twice as long as what the
tensors need, and more than 4 KiB longer (a column of a large matrix, its first and its last row), each of them
arrives contiguous and with memory of its own, and is copied for that where it is not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Row: TypeAlias = tuple[int, str, int, tuple[int, ...], tuple[int, ...], int]
"""Number of the storage (-1: no elements), dtype, offset in elements, shape, strides in elements, flags."""

GRADED, PARAMETER, CONJUGATE, NEGATIVE, MEMORY = 1, 2, 4, 8, 16
"""Flags: requires grad; is an nn.Parameter; conjugate and negative bits; raw memory, not a tensor for the user."""

_COPY_ABOVE = 2
_COPY_SAVES = 4096
_ALIGNMENT = 16
"""A span begins at a multiple of the longest element (complex128): its tensors may be of different dtypes."""

NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
"""The dtypes that travel, and what they are called on the way."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
_empty: dict[str, Tensor] = {}
"""An empty CPU tensor of each dtype met so far: `new_empty` is the quickest way to one more."""


class _Span:
    """The bytes of one storage that a message needs."""

    __slots__ = ("memory", "number", "start", "stop", "used")

    def __init__(self, memory: torch.UntypedStorage, start: int, stop: int, used: int) -> None:
        self.memory = memory
        self.start = start
        self.stop = stop
        self.used = used
        """Bytes of its tensors' elements."""
        self.number = -1
        """Place among the storages of the message, once it has one."""

    @property
    def scattered(self) -> bool:
        """True when copies of the tensors are much smaller than the span."""
        length = self.stop - self.start
        return length > _COPY_ABOVE * self.used and length > self.used + _COPY_SAVES


def lay_out(items: Sequence[tuple[Tensor, int] | None]) -> tuple[list[Row | None], list[Tensor]]:
    """Return the rows of a message's tensors and the storages to send, as views of the tensors' memory.

    items: strided CPU tensors, each with those flags that its class decides; None stays None.
    """
    spans: dict[int, _Span] = {}
    places = [_claim(item[0], spans) if item is not None else None for item in items]
    storages: list[Tensor] = []
    rows = [
        None if item is None else _row(item[0], item[1], place, storages)
        for item, place in zip(items, places, strict=True)
    ]
    return rows, storages


def _claim(tensor: Tensor, spans: dict[int, _Span]) -> tuple[_Span, int] | None:
    """Widen the span of the tensor's storage so that it holds the tensor; return it and the tensor's first byte."""
    memory = tensor.untyped_storage()
    size = tensor.itemsize
    used = int(tensor.nbytes)
    if not used:
        return None
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        stop = first + used
    else:
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = first + (reach + 1) * size
    start = first - first % _ALIGNMENT
    key = memory._cdata
    span = spans.get(key)
    if span is None:
        span = spans[key] = _Span(memory, start, stop, used)
    else:
        span.start = min(start, span.start)
        span.stop = max(stop, span.stop)
        span.used += used
    return span, first


def _row(tensor: Tensor, flags: int, place: tuple[_Span, int] | None, storages: list[Tensor]) -> Row:
    if tensor.requires_grad:
        flags |= GRADED
    if tensor.is_neg():
        flags |= NEGATIVE
    if tensor.is_conj():
        flags |= CONJUGATE
    name = NAMES[tensor.dtype]
    if place is None:
        return -1, name, 0, tuple(tensor.shape), tensor.stride(), flags
    span, first = place
    if span.number < 0:
        _check(tensor, span)
        if span.scattered:
            # A copy only where it is not in one piece already.
            piece = _as_stored(tensor.detach()).contiguous()
            start = int(piece.storage_offset()) * piece.itemsize
            storages.append(_bytes(piece.untyped_storage(), start, int(piece.nbytes)))
            return len(storages) - 1, name, 0, tuple(piece.shape), piece.stride(), flags
        span.number = len(storages)
        storages.append(_bytes(span.memory, span.start, span.stop - span.start))
    return span.number, name, (first - span.start) // tensor.itemsize, tuple(tensor.shape), tensor.stride(), flags


def _check(tensor: Tensor, span: _Span) -> None:
    held = 0 if tensor._is_zerotensor() else span.memory.nbytes()
    if held < span.stop:
        raise RuntimeError(
            f"A tensor of shape {list(tensor.shape)} and {tensor.dtype} cannot be sent: its storage holds {held} "
            f"bytes, {span.stop} are needed. Was it freed (resize_)? If it is a placeholder, send a clone."
        )


def _bytes(memory: torch.UntypedStorage, start: int, length: int) -> Tensor:
    """The bytes of a storage from `start` on as a tensor."""
    return _BYTES.new_empty(0).set_(memory, start, (length,), (1,))


def _as_stored(tensor: Tensor) -> Tensor:
    """The elements as they lie in memory, without conjugate and negative bits."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def build(row: Row, memories: Sequence[torch.UntypedStorage]) -> Any:
    """Return what a row stands for, on the received memory: a tensor, a Parameter or a memoryview.

    memories: the received storages, each from its first byte.
    """
    place, name, offset, shape, stride, flags = row
    template = _empty.get(name)
    if template is None:
        template = _first_of(name)
    if place < 0:
        tensor = template.new_empty_strided(shape, stride)
    else:
        tensor = template.new_empty(0).set_(memories[place], offset, shape, stride)
    if not flags:
        return tensor
    if flags & MEMORY:
        return tensor.numpy().data
    if flags & CONJUGATE:
        tensor = tensor.conj()
    if flags & NEGATIVE:
        tensor = torch._neg_view(tensor)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & GRADED))
    return tensor.requires_grad_() if flags & GRADED else tensor


def _first_of(name: str) -> Tensor:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise RuntimeError(f"A tensor of {name} has come, which torch {torch.__version__} here does not know.")
    return _empty.setdefault(name, torch.empty(0, dtype=dtype, device="cpu"))
