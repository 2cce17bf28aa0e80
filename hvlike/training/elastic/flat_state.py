"""A state dict as one run of bytes, in memory that can be kept, sent and read in place.

length of the structure (8 bytes) | structure, pickled | the tensors one after the other, each at a multiple of 64
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.collectives.requests.reduction import is_dense, row_by_row
from hvlike.training.broadcast import pack, unpack
from hvlike.transport.memory.malloc import allocate_receive_buffer

_ALIGNMENT = 64
_LENGTH_BYTES = 8

Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape and strides


def flatten_state(state: Any, memory: Tensor | None = None) -> Tensor:
    """Return a copy of a state as bytes in host memory; `memory`, an earlier one that is given up, is used if it fits.

    The state is anything that pickles, with dense or strided tensors anywhere in it.
    """
    structure, tensors = pack(state, [])
    forms = [_form_of(tensor) for tensor in tensors]
    data = pickle.dumps((structure, forms), protocol=5)
    places, end = _places(len(data), [tensor.nbytes for tensor in tensors])
    flat = resized(memory, end)
    head = _LENGTH_BYTES + len(data)
    flat[:head].copy_(
        torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data), dtype=torch.uint8)
    )
    views = _views(flat, forms, places)
    with torch.inference_mode(False), torch.no_grad():
        if views:
            torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
    return flat


def read_state(flat: Tensor) -> Any:
    """Return the state; its tensors lie in the memory of `flat`."""
    data = flat.numpy().data
    head = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    structure, forms = pickle.loads(data[_LENGTH_BYTES:head])
    places, _ = _places(head - _LENGTH_BYTES, [math.prod(shape) * dtype.itemsize for dtype, shape, _ in forms])
    return unpack(structure, [], _views(flat, forms, places))


def resized(memory: Tensor | None, nbytes: int) -> Tensor:
    """Return this many bytes of host memory: the start of `memory`, or new memory where that is too short."""
    if memory is None or memory.untyped_storage().nbytes() < nbytes:
        return allocate_receive_buffer([nbytes], torch.uint8)
    return memory.as_strided([nbytes], [1], 0)


def _form_of(tensor: Tensor) -> Form:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    dense = tensor.is_contiguous() or is_dense(shape, strides)
    return tensor.dtype, shape, strides if dense else row_by_row(shape)


def _places(structure: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where in the bytes each tensor begins, and where the last one ends."""
    places, end = [], _LENGTH_BYTES + structure
    for length in lengths:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + length
    return places, end


def _views(flat: Tensor, forms: Sequence[Form], places: Sequence[int]) -> list[Tensor]:
    storage = flat.untyped_storage()
    typed = {dtype: torch.empty(0, dtype=dtype, device="cpu").set_(storage) for dtype, _, _ in forms}
    return [
        typed[dtype].as_strided(shape, strides, place // dtype.itemsize)
        for (dtype, shape, strides), place in zip(forms, places, strict=True)
    ]
