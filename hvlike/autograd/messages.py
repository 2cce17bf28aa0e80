"""How messages of a backward travel: as notices of RPC, with the memory of gradients out of band."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.autograd.protocol import BackwardMessage, Gradients, Mode
from hvlike.rpc.wire.message import Packed
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack
from hvlike.rpc.wire.tensors import SHORT_BYTES, SHORT_RECORD_BYTES, Body, join_parts, pack_tensor, unpack_tensor

BACKWARD_MESSAGE = 52  # The kind of these notices

_ASKS, _DONE, _ABORT, _RETAIN = 1, 2, 4, 8
_MODE_SHIFT = 4
_NONE = -1

Tensors = list[tuple[Any, int, bool]] | Body
"""By tensors.pack_tensor: buffers, where the records begin in them, whether the memory is apart. Or by pickler.pack."""


class Heading(NamedTuple):
    context: int
    number: int  # The id of the backward, made by its root
    oldest: int  # The number of the root's oldest backward in this context that runs
    mode: Mode
    retain_graph: bool


Wire = tuple[Any, ...]
"""Context, number, oldest, flags, answers, tensors, marks, acknowledged, error, lost.

Answers: send, number of tensors, a bit for each gradient that is there; (send, -1, 0) where there are none.
"""


def encode(heading: Heading, message: BackwardMessage, rank: int) -> tuple[Wire, list[Tensor]]:
    context, number, oldest, mode, retain_graph = heading
    flags = _ASKS * message.asks | _DONE * message.done | _ABORT * message.abort | _RETAIN * retain_graph
    flags |= mode << _MODE_SHIFT
    answers = []
    there: list[Tensor] = []
    for send, gradients in message.gradients.items():
        if gradients is None:
            answers.append((send, _NONE, 0))
            continue
        bits = 0
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                bits |= 1 << place
                there.append(gradient)
        answers.append((send, len(gradients), bits))
    tensors, storages = _pack(there, rank) if there else (b"", [])
    rest = message.marks, message.acknowledged, message.error, message.lost
    return (context, number, oldest, flags, answers, tensors, *rest), storages


def heading_of(wire: Wire) -> Heading:
    context, number, oldest, flags, *_ = wire
    return Heading(context, number, oldest, Mode(flags >> _MODE_SHIFT), bool(flags & _RETAIN))


def opens(wire: Wire) -> bool:
    """Whether the message concerns a worker that does not know its backward."""
    return bool(wire[3] & _ASKS or wire[6])


def decode(wire: Wire, storages: list[Tensor], source: int) -> BackwardMessage:
    _, _, _, flags, answers, tensors, marks, acknowledged, error, lost = wire
    there = iter(_unpack(tensors, storages, source) if tensors else ())
    gradients: dict[int, Gradients | None] = {
        send: None if count == _NONE else [next(there) if bits >> place & 1 else None for place in range(count)]
        for send, count, bits in answers
    }
    return BackwardMessage(
        gradients,
        asks=bool(flags & _ASKS),
        done=bool(flags & _DONE),
        marks=marks,
        acknowledged=acknowledged,
        error=error,
        lost=lost,
        abort=bool(flags & _ABORT),
    )


def _pack(tensors: list[Tensor], rank: int) -> tuple[Tensors | PickleBuffer, list[Tensor]]:
    simple: list[tuple[Any, int, bool]] = []
    short_bytes = SHORT_RECORD_BYTES if len(tensors) == 1 else SHORT_BYTES
    storages: list[Tensor] = []
    for each in tensors:
        is_plain = type(each) is Tensor and each.layout is torch.strided
        if is_plain and each.nbytes <= short_bytes:
            # The gradient of a sum is an expanded number.
            each = each.contiguous()
        if not is_plain or (found := pack_tensor(each, 0, short_bytes)) is None:
            packed = pack(tensors, Outgoing(rank))
            return _as_buffer(packed.body), packed.storages
        record, elements, storage = found
        simple.append((_as_buffer(join_parts((elements, record))), len(elements), storage is not None))
        if storage is not None:
            storages.append(storage)
    return simple, storages


def _unpack(tensors: Tensors, storages: list[Tensor], source: int) -> list[Tensor]:
    if isinstance(tensors, list):
        memory = iter(storages)
        return [unpack_tensor(body, start, next(memory) if apart else None) for body, start, apart in tensors]
    received: list[Tensor] = unpack(Packed(tensors, storages), Incoming(source))
    return received


def _as_buffer(body: Body) -> Body | PickleBuffer:
    """Return a body as Channel.send takes it: a long one is sent out of band, without a copy into the pickle."""
    return PickleBuffer(body) if type(body) is bytearray else body
