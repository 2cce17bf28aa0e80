"""Copies of state dicts: into memory that is kept, as new memory costs several times as much as the copy itself.

copy_into       tensors into those of an earlier copy, on the same devices
flatten_state   all of it as one run of bytes in host memory, that can be sent and read in place:

length of the structure (8 bytes) | structure, pickled | the tensors one after the other, each at a multiple of 64
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.collectives.requests.reduction import is_dense, row_by_row
from hvlike.training.broadcast import pack, unpack
from hvlike.transport.memory.malloc import allocate_receive_buffer
from hvlike.transport.memory.own_memory import check_memory

_UNCHANGING = (bool, int, float, complex, str, bytes, type(None))


def copy_into(kept: Any, state: Any) -> Any:
    """Return a copy of a state dict that shares nothing with it; tensors go into those of an earlier copy. Local.

    The copy is as deepcopy would make it, on the same devices. Whoever loads it must copy it again: optimizers keep
    the tensors they are given, and the next copy would change those.

    kept: an earlier copy that is given up, or None; its tensors of fitting dtype, shape and device are written to.
    state: tensors and plain values in dicts, lists and tuples; all else is deep-copied.
    """
    copier = _Copier()
    # A tensor that was made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        copy = copier.copied(kept, state)
        if copier.sources:
            torch._foreach_copy_(copier.targets, copier.sources)
    return copy


class _Copier:
    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # By address: tied weights are several tensors
        self._memo: dict[int, Any] = {}

    def copied(self, kept: Any, value: Any) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if isinstance(value, Tensor):
            return self._tensor(kept, value)
        if kind is dict or kind is OrderedDict:
            before = kept if type(kept) is kind else {}
            copy = kind((self.copied(None, key), self.copied(before.get(key), each)) for key, each in value.items())
            if kind is OrderedDict:
                # Modules keep their versions there.
                vars(copy).update(deepcopy(vars(value)))
            return copy
        if kind is list or kind is tuple:
            return kind(self._each(kept if type(kept) is kind else (), value))
        return deepcopy(value, self._memo)

    def _each(self, kept: Any, values: Any) -> Iterable[Any]:
        for place, each in enumerate(values):
            yield self.copied(kept[place] if place < len(kept) else None, each)

    def _tensor(self, kept: Any, value: Tensor) -> Tensor:
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        if not plain or value.is_quantized or value.is_meta or not value.numel():
            copy: Tensor = deepcopy(value, self._memo)
            return copy
        check_memory("a state, a tensor in it", value)
        address = value.data_ptr()
        other, target = self._known.get(address, (None, None))
        if target is None or not _alike(other, value):
            target = kept if _fits(kept, value) else torch.empty_like(value)
            self._known[address] = value, target
            self.targets.append(target)
            self.sources.append(value)
        # Objects that are deep-copied may hold it too.
        self._memo[id(value)] = target
        return target


def _fits(kept: Any, value: Tensor) -> bool:
    # A copy has the strides of a dense tensor also where the original is none.
    return _alike(kept, value) or (not value.is_contiguous() and _alike(kept, torch.empty_like(value)))


def _alike(one: Any, other: Tensor) -> bool:
    return (
        type(one) is Tensor
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


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
