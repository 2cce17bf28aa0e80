"""How tensors travel: one row of numbers for each tensor, and the used bytes of every storage, once.

Of each storage the message holds the one span of bytes that covers all its tensors in this message. Strides and shared
memory survive. The exception: where the span is more than twice as long as what the tensors need, and more than 4 KiB
longer (a column of a large matrix, its first and its last row), each tensor arrives contiguous with memory of its own,
and is copied for that if it is not contiguous.

Short spans are copied into the body of the message, because sending a storage by itself costs far more. Long spans are
sent from where they lie. A sparse tensor travels as its dense parts, whose rows stand right before its own.

Simple tensors, dense and contiguous ones that share no memory, take the fast path at the end of this file: a record of
a few bytes instead of rows. Each 64 KiB copy of long elements takes 10 to 30 us with cold caches: into the body, with
the body into the message, by MPI, and from the message into the tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from struct import Struct
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.errors import RpcError

Row: TypeAlias = tuple[int, str, int, tuple[int, ...], tuple[int, ...], int]
"""Place, dtype, offset in elements, shape, strides in elements, flags.

Place: 0, 1, ... number the storages; NOWHERE: there are no elements; NOWHERE - 1, NOWHERE - 2, ... number the short
spans in the body.
"""

NOWHERE = -1
REQUIRES_GRAD, PARAMETER, CONJUGATE, NEGATIVE, RAW_MEMORY, SPARSE_PART, APART = (1 << bit for bit in range(7))
"""Flags: requires grad; is an nn.Parameter; conjugate and negative bits; raw memory, not a tensor for the user; part of
the sparse tensor that follows; in a record: the elements go by themselves.
"""

SHORT_BYTES = 16384
"""A span up to this size goes in the body. Echo between two ranks of one node, median: 16 KiB in the body 192 us, by
itself 272; 64 KiB 372 and 297; 100 tensors of 256 bytes 2.1 ms and 4.8."""

_COPY_ABOVE = 2
_COPY_SAVES = 4096
_ALIGNMENT = 16  # Of a span of several tensors: that of the longest element, complex128, as their dtypes may differ

NAMES = {  # Of the dtypes that travel, in a message
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(eq=False, slots=True)
class _Span:
    """The bytes of one storage that a message needs."""

    memory: torch.UntypedStorage
    start: int
    stop: int
    used: int  # Bytes of its tensors' elements
    place: int | None = None  # Its place in the message, once that is known

    @property
    def scattered(self) -> bool:
        """True when copies of the tensors are much smaller than the span."""
        length = self.stop - self.start
        return length > _COPY_ABOVE * self.used and length > self.used + _COPY_SAVES


class SentMemory:
    __slots__ = ("short", "storages")

    def __init__(self) -> None:
        self.short: list[bytes] = []  # Copies of short spans
        self.storages: list[Tensor] = []  # Long spans: views of the tensors' memory as bytes

    def add(self, memory: torch.UntypedStorage, start: int, length: int) -> int:
        """Add bytes of a storage, from `start` on; return their place."""
        if length <= SHORT_BYTES:
            self.short.append(ctypes.string_at(memory.data_ptr() + start, length))
            return NOWHERE - len(self.short)
        self.storages.append(_BYTES.new_empty(0).set_(memory, start, (length,), (1,)))
        return len(self.storages) - 1


def lay_out(items: Sequence[tuple[Tensor, int] | None]) -> tuple[list[Row | None], SentMemory]:
    """Return the rows of a message's strided CPU tensors, given with their flags, and the memory to send."""
    spans: dict[int, _Span] = {}
    places = [_cover(item[0], spans) if item is not None else None for item in items]
    memory = SentMemory()
    rows = [
        None if item is None else _row(item[0], item[1], place, memory)
        for item, place in zip(items, places, strict=True)
    ]
    return rows, memory


def _cover(tensor: Tensor, spans: dict[int, _Span]) -> tuple[_Span, int] | None:
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
    key = memory._cdata
    span = spans.get(key)
    if span is None:
        span = spans[key] = _Span(memory, first, stop, used)
    else:
        start = min(first, span.start)
        span.start = start - start % _ALIGNMENT
        span.stop = max(stop, span.stop)
        span.used += used
    return span, first


def _row(tensor: Tensor, flags: int, covered: tuple[_Span, int] | None, memory: SentMemory) -> Row:
    if tensor.requires_grad:
        flags |= REQUIRES_GRAD
    if tensor.is_neg():
        flags |= NEGATIVE
    if tensor.is_conj():
        flags |= CONJUGATE
    name = NAMES[tensor.dtype]
    if covered is None:
        return NOWHERE, name, 0, tuple(tensor.shape), tensor.stride(), flags
    span, first = covered
    if span.place is None:
        _check(tensor, span)
        if span.scattered:
            piece = _as_stored(tensor.detach()).contiguous()
            start = int(piece.storage_offset()) * piece.itemsize
            place = memory.add(piece.untyped_storage(), start, int(piece.nbytes))
            return place, name, 0, tuple(piece.shape), piece.stride(), flags
        span.place = memory.add(span.memory, span.start, span.stop - span.start)
    return span.place, name, (first - span.start) // tensor.itemsize, tuple(tensor.shape), tensor.stride(), flags


def _check(tensor: Tensor, span: _Span) -> None:
    held = 0 if tensor._is_zerotensor() else span.memory.nbytes()
    if held < span.stop:
        raise RpcError(
            f"A tensor of shape {list(tensor.shape)} and {tensor.dtype} cannot be sent: its storage holds {held} "
            f"bytes, {span.stop} are needed. Was it freed (resize_)? If it is a placeholder, send a clone."
        )


def _as_stored(tensor: Tensor) -> Tensor:
    """Return the elements as they lie in memory, without conjugate and negative bits."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


class ReceivedMemory:
    __slots__ = ("_memories", "_short")

    def __init__(self, short: Sequence[bytes], storages: Sequence[Tensor]) -> None:
        """`short` as in SentMemory; `storages` are uint8 tensors that begin at their memory's first byte."""
        self._short = short
        self._memories = {place: storage.untyped_storage() for place, storage in enumerate(storages)}

    def _memory(self, place: int) -> torch.UntypedStorage:
        """Return the storage of a place, the same one each time."""
        memory = self._memories.get(place)
        if memory is None:
            span = self._short[NOWHERE - 1 - place]
            memory = _BYTES.new_empty(len(span)).untyped_storage()
            ctypes.memmove(memory.data_ptr(), span, len(span))
            self._memories[place] = memory
        return memory

    def build(self, row: Row, device: str | None = None) -> Any:
        """Return what a row stands for: a tensor or Parameter (on `device`, if given), or a memoryview."""
        place, name, offset, shape, stride, flags = row
        if place == NOWHERE:
            tensor = _template(name).new_empty_strided(shape, stride)
        else:
            tensor = _template(name).new_empty(0).set_(self._memory(place), offset, shape, stride)
        if device is not None:
            tensor = tensor.to(device)
        if flags & RAW_MEMORY:
            return tensor.numpy().data
        if flags & CONJUGATE:
            tensor = tensor.conj()
        if flags & NEGATIVE:
            tensor = torch._neg_view(tensor)
        return _with_flags(tensor, flags)


def _with_flags(tensor: Tensor, flags: int) -> Tensor:
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


@cache
def _template(name: str) -> Tensor:
    """Return an empty CPU tensor of a dtype: its `new_empty` is the fastest way to make a tensor."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise RpcError(f"A tensor of dtype {name} arrived, which torch {torch.__version__} here does not know.")
    return torch.empty(0, dtype=dtype, device="cpu")


SparseRow: TypeAlias = tuple[str, tuple[int, ...], bool, bool]  # Layout, shape, is coalesced (COO only), requires grad
_COO = "sparse_coo"
SPARSE_LAYOUTS = {getattr(torch, name): name for name in (_COO, "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")}
"""The sparse layouts that travel, and their names in a message."""


def split_sparse(tensor: Tensor) -> tuple[list[Tensor], SparseRow]:
    plain = tensor.detach()
    name = SPARSE_LAYOUTS[tensor.layout]
    shape = tuple(tensor.shape)
    if name == _COO:
        return [plain._indices(), plain._values()], (name, shape, plain.is_coalesced(), tensor.requires_grad)
    if name in ("sparse_csr", "sparse_bsr"):
        indices = [plain.crow_indices(), plain.col_indices()]
    else:
        indices = [plain.ccol_indices(), plain.row_indices()]
    return [*indices, plain.values()], (name, shape, False, tensor.requires_grad)


def assemble_sparse(parts: Sequence[Tensor], row: SparseRow) -> Tensor:
    name, shape, coalesced, graded = row
    if name == _COO:
        indices, values = parts
        tensor = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=False, is_coalesced=coalesced, device=values.device
        )
        return tensor.requires_grad_(graded)
    compressed, plain, values = parts
    layout, device = getattr(torch, name), values.device
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False, requires_grad=graded, device=device
    )


SHORT_RECORD_BYTES = 1 << 16
"""Elements of an only tensor up to this size go in the body. Echo between two ranks of one node, median: 16 KiB in the
body 194 us, by itself 304; 64 KiB 227 and 223, and a step of distributed autograd with such messages 5 to 10 % shorter;
256 KiB 358 and 239. Several tensors in one message use SHORT_BYTES, because the body is copied several times."""

_LONG_BYTES = 1 << 12  # From this size on, avoiding a copy saves more than it costs
Body = bytes | bytearray | memoryview  # A long one: bytearray on the sender, view of the message on the receiver
_COMMON = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_TEMPLATES = [_template(name) for name in _COMMON]
_NUMBERS = {template.dtype: number for number, template in enumerate(_TEMPLATES)}  # A message holds this number.


@cache
def _record(dimensions: int) -> Struct:
    """Index of the dtype, flags, number of dimensions, shape."""
    return Struct(f"<BBB{dimensions}Q")


@lru_cache(maxsize=64)
def _array(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def join_parts(parts: Sequence[bytes | memoryview]) -> bytes | bytearray:
    for part in parts:
        if type(part) is not bytes or len(part) >= _LONG_BYTES:
            return bytearray().join(parts)
    return b"".join(parts)


SimpleTensors: TypeAlias = tuple[list[bytes | memoryview], list[Tensor], list[Tensor]]
"""What travels in the body, for each tensor a record and its elements; the memory that goes by itself; and those of the
tensors that require grad."""


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested


def pack_simple(items: Sequence[tuple[Tensor, int] | None]) -> SimpleTensors | None:
    """Pack dense CPU tensors, given as for `lay_out`; long elements in the body are views of them.

    Returns None unless all have elements of a common dtype, contiguous and all in memory, and share no memory.
    """
    short_bytes = SHORT_RECORD_BYTES if len(items) == 1 else SHORT_BYTES
    parts: list[bytes | memoryview] = []
    storages: list[Tensor] = []
    graded: list[Tensor] = []
    memories = set()
    for item in items:
        if item is None:
            return None
        tensor, flags = item
        number = _NUMBERS.get(tensor.dtype)
        try:
            address, nbytes = tensor.data_ptr(), int(tensor.nbytes)
        except RuntimeError:
            # It stands for others in a transformation of torch.func.
            return None
        # Placeholders and freed tensors have no address. The imaginary part of a conjugate has the negative bit.
        if number is None or not address or not nbytes or not tensor.is_contiguous() or tensor.is_neg():
            return None
        memory, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        memories.add(memory._cdata)
        if flags & ~PARAMETER or memory.nbytes() < start + nbytes:
            return None
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD
            graded.append(tensor)
        shape = tensor.shape
        if nbytes > short_bytes:
            flags |= APART
        parts.append(_record(len(shape)).pack(number, flags, len(shape), *shape))
        if flags & APART:
            storages.append(_BYTES.new_empty(0).set_(memory, start, (nbytes,), (1,)))
        elif nbytes >= _LONG_BYTES:
            parts.append(memoryview(_array(nbytes).from_address(address)))
        else:
            parts.append(ctypes.string_at(address, nbytes))
    return (parts, storages, graded) if len(memories) == len(items) else None


def unpack_simple(body: Body, start: int, stop: int, storages: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose records and elements are in the body from `start` to `stop`."""
    arrived: list[Tensor] = []
    memories = iter(storages)
    while start < stop:
        record = _record(body[start + 2])
        number, flags, _, *shape = record.unpack_from(body, start)
        start += record.size
        template = _TEMPLATES[number]
        if flags & APART:
            tensor = template.new_empty(0).set_(next(memories).untyped_storage(), 0, shape)
        else:
            tensor = template.new_empty(shape)
            nbytes = math.prod(shape) * template.itemsize
            if isinstance(body, bytes):
                ctypes.memmove(tensor.data_ptr(), body[start : start + nbytes], nbytes)
            else:
                elements = ctypes.addressof(ctypes.c_char.from_buffer(body, start))
                ctypes.memmove(tensor.data_ptr(), elements, nbytes)
            start += nbytes
        arrived.append(_with_flags(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor)
    return arrived
