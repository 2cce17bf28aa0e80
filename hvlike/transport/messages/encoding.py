"""How a message is laid out, as pure functions over memory.

    header | pickle | inline tensors | buffers of the pickle | length of each buffer | number of buffers

The header holds topic and flags, the tag of the payload (0: the tensors are inline), and the length of the pickle.
Tensors that are not inline follow as MPI messages of at most PIECE_BYTES each, under the tag of the payload.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvlike.transport.memory.dtypes import raw_view
from hvlike.transport.memory.malloc import allocate_receive_buffer
from hvlike.transport.messages.direct_copy import CopyOffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

INLINE_BYTES = 4096
"""Tensors up to this size in all are part of the message itself."""

PIECE_BYTES = 16 << 20
"""The longest MPI message of a payload. Where MPI moves bytes only while it is called, each piece that has arrived
shows the receiver that it pays to go on polling."""

HEADER = struct.Struct("<IIQ")
HAS_TENSORS, HAS_BUFFERS = 1, 2
FLAG_BITS = 2
_COUNT = struct.Struct("<I")

Description = int | tuple[torch.dtype, tuple[int, ...]]
"""What the receiver makes a tensor from: dtype and shape, or the length of a tensor of plain bytes."""


def pack_buffers(found: Sequence[pickle.PickleBuffer]) -> list[memoryview | bytes]:
    """The end of a message: these buffers, the length of each, and their number."""
    memories = [each.raw() for each in found]
    lengths = struct.pack(f"<{len(memories)}Q", *(each.nbytes for each in memories))
    return [*memories, lengths, _COUNT.pack(len(memories))]


def unpack_buffers(message: memoryview) -> list[memoryview]:
    """The buffers in the end of a message, as views."""
    end = len(message) - _COUNT.size
    (count,) = _COUNT.unpack_from(message, end)
    end -= 8 * count
    lengths = struct.unpack_from(f"<{count}Q", message, end)
    start = end - sum(lengths)
    buffers = []
    for length in lengths:
        buffers.append(message[start : start + length])
        start += length
    return buffers


def describe_tensors(tensors: Sequence[torch.Tensor]) -> tuple[list[NDArray[np.uint8]], list[Description]]:
    """The bytes of these tensors, and what the receiver makes them from."""
    views: list[NDArray[np.uint8]] = []
    descriptions: list[Description] = []
    for tensor in tensors:
        views.append(view := bytes_of(tensor))
        descriptions.append(view.nbytes if _is_plain(tensor) else (tensor.dtype, tuple(tensor.shape)))
    return views, descriptions


def make_tensor(description: Description) -> torch.Tensor:
    """An uninitialised tensor to receive into."""
    if isinstance(description, int):
        return allocate_receive_buffer((description,), torch.uint8)
    dtype, shape = description
    return allocate_receive_buffer(shape, dtype)


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if _is_plain(tensor):
        plain: NDArray[np.uint8] = tensor.numpy()
        return plain
    return raw_view(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a row of bytes, which is what RPC sends: quicker to describe and to view than other tensors."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()


def pieces_of(views: Sequence[NDArray[np.uint8]], offer: CopyOffer | None = None) -> list[NDArray[np.uint8]]:
    """The MPI messages of a payload, without the view that is copied directly (`offer`)."""
    return [
        view[start : start + PIECE_BYTES]
        for place, view in enumerate(views)
        if offer is None or place != offer[0]
        for start in range(0, view.nbytes, PIECE_BYTES)
    ]
