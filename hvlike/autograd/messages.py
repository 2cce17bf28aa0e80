"""How messages of a backward travel: as notices of RPC, with the memory of gradients out of band."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.autograd.protocol import BackwardMessage, Gradients, Mode
from hvlike.rpc.wire.message import Packed
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack
from hvlike.rpc.wire.tensors import SHORT_BYTES

BACKWARD_MESSAGE = 52  # The kind of these notices

_ASKS, _DONE, _ABORT, _RETAIN = 1, 2, 4, 8
_MODE_SHIFT = 4
_NONE = -1


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
                if gradient.layout is torch.strided and gradient.nbytes <= SHORT_BYTES:
                    # The gradient of a sum is an expanded number.
                    gradient = gradient.contiguous()
                there.append(gradient)
        answers.append((send, len(gradients), bits))
    tensors = pack(there[0] if len(there) == 1 else there, Outgoing(rank)) if there else Packed(b"", [])
    rest = message.marks, message.acknowledged, message.error, message.lost
    # A long body is sent out of band, without a copy into the pickle.
    body = PickleBuffer(tensors.body) if type(tensors.body) is bytearray else tensors.body
    return (context, number, oldest, flags, answers, body, *rest), tensors.storages


def heading_of(wire: Wire) -> Heading:
    context, number, oldest, flags, *_ = wire
    return Heading(context, number, oldest, Mode(flags >> _MODE_SHIFT), bool(flags & _RETAIN))


def opens(wire: Wire) -> bool:
    """Whether the message concerns a worker that does not know its backward."""
    return bool(wire[3] & _ASKS or wire[6])


def decode(wire: Wire, storages: list[Tensor], source: int) -> BackwardMessage:
    _, _, _, flags, answers, tensors, marks, acknowledged, error, lost = wire
    came = unpack(Packed(tensors, storages), Incoming(source)) if tensors else ()
    there = iter((came,) if isinstance(came, Tensor) else came)
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
