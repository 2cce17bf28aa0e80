"""The fast path for a message with one dense contiguous tensor: a record of a few bytes instead of a table.

Everything that pack_tensor refuses travels as tensors.py describes.

Each 64 KiB copy of long elements takes 10 to 30 us with cold caches: into the body, with the body into the message, by
MPI, and from the message into the tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from pickle import PickleBuffer
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from hvlike.rpc.wire.tensors import PARAMETER, REQUIRES_GRAD

SHORT_RECORD_BYTES = 1 << 16
"""Elements up to this size go in the body. Echo between two ranks of one node, median: 16 KiB in the body 194 us, by
itself 304; 64 KiB 227 and 223, and a step of distributed autograd with such messages 5 to 10 % shorter; 256 KiB 358
and 239. Several tensors in one message use the limit of tensors.py, because the body is copied several times."""

_LONG_BYTES = 1 << 12
"""From this size on, avoiding a copy saves more than it costs."""

Body = bytes | bytearray | memoryview
"""A short body is bytes; a long one is a bytearray on the sender and a view of the message on the receiver."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""A message holds the index in this tuple."""

_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_TEMPLATES = [torch.empty(0, dtype=dtype, device="cpu") for dtype in _DTYPES]
_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


@cache
def _record(dimensions: int) -> Struct:
    """Index of the dtype, flags, number of dimensions, shape."""
    return Struct(f"<BBB{dimensions}Q")


@lru_cache(maxsize=64)
def _array(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def join_parts(parts: Sequence[bytes | memoryview | PickleBuffer]) -> bytes | bytearray:
    for part in parts:
        if type(part) is not bytes or len(part) >= _LONG_BYTES:
            return bytearray().join(parts)
    return b"".join(parts)


def as_buffer(body: Body) -> Body | PickleBuffer:
    """Return a body as Channel.send takes it: a long one is sent out of band, without a copy into the pickle."""
    return PickleBuffer(body) if type(body) is bytearray else body


def pack_tensor(tensor: Tensor, flags: int, short_bytes: int) -> tuple[bytes, bytes | memoryview, Tensor | None] | None:
    """Return the record, the elements that travel in the body, and the memory that goes by itself.

    Returns None unless the strided CPU tensor has elements of a common dtype, contiguous and all in memory.
    short_bytes: elements up to this size travel in the body; the long ones of these are a view of the tensor.
    """
    number = _NUMBERS.get(tensor.dtype)
    address, nbytes = tensor.data_ptr(), int(tensor.nbytes)
    # Placeholders and freed tensors have no address. The imaginary part of a conjugate has the negative bit.
    if number is None or not address or not nbytes or not tensor.is_contiguous() or tensor.is_neg():
        return None
    memory, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
    if memory.nbytes() < start + nbytes:
        return None
    if tensor.requires_grad:
        flags |= REQUIRES_GRAD
    shape = tensor.shape
    record = _record(len(shape)).pack(number, flags, len(shape), *shape)
    if nbytes <= short_bytes:
        is_long = nbytes >= _LONG_BYTES
        elements = memoryview(_array(nbytes).from_address(address)) if is_long else ctypes.string_at(address, nbytes)
        return record, elements, None
    return record, b"", _BYTES.new_empty(0).set_(memory, start, (nbytes,), (1,))


def unpack_tensor(body: Body, start: int, storage: Tensor | None) -> Tensor:
    """Return the tensor whose record begins at `start`, after its elements unless these came as `storage`."""
    number, flags, _, *shape = _record(body[start + 2]).unpack_from(body, start)
    template = _TEMPLATES[number]
    tensor: Tensor
    if storage is None:
        tensor = template.new_empty(shape)
        nbytes = math.prod(shape) * template.itemsize
        if isinstance(body, bytes):
            ctypes.memmove(tensor.data_ptr(), body[start - nbytes : start], nbytes)
        else:
            elements = ctypes.addressof(ctypes.c_char.from_buffer(body, start - nbytes))
            ctypes.memmove(tensor.data_ptr(), elements, nbytes)
    else:
        tensor = template.new_empty(0).set_(storage.untyped_storage(), 0, shape)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
