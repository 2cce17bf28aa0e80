"""Letters on the wire: notices of RPC, whose tensors go out of band."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.autograd.letter import Gradients, Letter
from hvlike.autograd.protocol import Mode
from hvlike.rpc.message import Packed
from hvlike.rpc.pickler import Incoming, Outgoing, pack, unpack
from hvlike.rpc.tensors import NAMES, SHORT_BYTES, Hold, Row, build, lay_out

LETTER = 52
"""The kind of these notices."""

_ASKS, _DONE, _ABORT, _RETAIN = 1, 2, 4, 8
_MODE_SHIFT = 4
_NONE = -1

_Short = tuple[str, tuple[int, ...], bytes]
"""A contiguous tensor of a few bytes: dtype, shape, elements."""

Tensors = list[_Short] | tuple[list[Row | None], list[bytes]] | bytes
"""Short ones; rows of dense ones and their short pieces of memory; where others are among them, a pickler.pack."""


class Heading(NamedTuple):
    """What all letters of one backward say."""

    context: int
    number: int
    """Of the backward; begins with the rank of its root."""
    oldest: int
    """The number of the root's oldest backward in this context that goes on."""
    mode: Mode
    retain_graph: bool


Wire = tuple[Any, ...]
"""Context, number, oldest, flags, answers, tensors, marks, acknowledged, error.

Answers: message, number of tensors, which of them are there (a bit each); (message, -1, 0) where there are none.
"""


def encode(heading: Heading, letter: Letter, rank: int) -> tuple[Wire, list[Tensor]]:
    """The letter to a worker as it travels, and the memory that goes with it."""
    context, number, oldest, mode, retain_graph = heading
    flags = _ASKS * letter.asks | _DONE * letter.done | _ABORT * letter.abort | _RETAIN * retain_graph
    flags |= mode << _MODE_SHIFT
    answers = []
    there: list[Tensor] = []
    for message, gradients in letter.gradients.items():
        if gradients is None:
            answers.append((message, _NONE, 0))
            continue
        bits = 0
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                bits |= 1 << place
                there.append(gradient)
        answers.append((message, len(gradients), bits))
    tensors, storages = _pack(there, rank) if there else (b"", [])
    rest = letter.marks, letter.acknowledged, letter.error
    return (context, number, oldest, flags, answers, tensors, *rest), storages


def heading_of(wire: Wire) -> Heading:
    """What a letter says of its backward."""
    context, number, oldest, flags, *_ = wire
    return Heading(context, number, oldest, Mode(flags >> _MODE_SHIFT), bool(flags & _RETAIN))


def opens(wire: Wire) -> bool:
    """Whether it means something to a worker that has not heard of its backward."""
    return bool(wire[3] & _ASKS or wire[6])


def decode(wire: Wire, storages: list[Tensor], source: int) -> Letter:
    """The letter of a worker."""
    _, _, _, flags, answers, tensors, marks, acknowledged, error = wire
    there = iter(_unpack(tensors, storages, source) if tensors else ())
    gradients: dict[int, Gradients | None] = {
        message: None if count == _NONE else [next(there) if bits >> place & 1 else None for place in range(count)]
        for message, count, bits in answers
    }
    return Letter(
        gradients,
        asks=bool(flags & _ASKS),
        done=bool(flags & _DONE),
        marks=marks,
        acknowledged=acknowledged,
        error=error,
        abort=bool(flags & _ABORT),
    )


def _pack(tensors: list[Tensor], rank: int) -> tuple[Tensors, list[Tensor]]:
    if all(_is_short(each) for each in tensors):
        return [(NAMES[each.dtype], tuple(each.shape), _bytes_of(each)) for each in tensors], []
    if all(type(each) is Tensor and each.layout is torch.strided and each.dtype in NAMES for each in tensors):
        rows, cargo = lay_out([(tensor, 0) for tensor in tensors])
        return (rows, cargo.short), cargo.storages
    packed = pack(tensors, Outgoing(rank))
    return packed.body, packed.storages


def _unpack(tensors: Tensors, storages: list[Tensor], source: int) -> list[Tensor]:
    if isinstance(tensors, bytes):
        received: list[Tensor] = unpack(Packed(tensors, storages), Incoming(source))
        return received
    if isinstance(tensors, list):
        return [_restored(*each) for each in tensors]
    rows, short = tensors
    hold = Hold(short, storages)
    return [build(row, hold) for row in rows if row is not None]


def _is_short(tensor: Tensor) -> bool:
    """Whether a copy into the letter is all that it takes: gradients share nothing that anybody relies on."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and 0 < tensor.nbytes <= SHORT_BYTES
        and tensor.is_contiguous()
        and tensor.is_cpu
        and tensor.dtype in NAMES
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def _bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), int(tensor.nbytes))


def _restored(name: str, shape: tuple[int, ...], elements: bytes) -> Tensor:
    template = _templates.get(name)
    if template is None:
        template = _templates[name] = torch.empty(0, dtype=getattr(torch, name), device="cpu")
    tensor = template.new_empty(shape)
    ctypes.memmove(tensor.data_ptr(), elements, len(elements))
    return tensor


_templates: dict[str, Tensor] = {}
"""An empty tensor of each dtype met so far: `new_empty` is the quickest way to one more."""
