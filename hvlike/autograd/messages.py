"""How messages of a backward travel: as notices of RPC, with the memory of gradients out of band."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, NamedTuple

from torch import Tensor

from hvlike.autograd.protocol import BackwardMessage, Mode
from hvlike.rpc.wire.message import Packed
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack

BACKWARD_MESSAGE = 52  # The kind of these notices


class Heading(NamedTuple):
    context: int
    number: int  # The id of the backward, made by its root
    oldest: int  # The number of the root's oldest backward in this context that runs
    mode: Mode
    retain_graph: bool


Wire = tuple[Any, ...]
"""The fields of a Heading, then those of a BackwardMessage, with the gradients as pickler.pack leaves them."""


def encode(heading: Heading, message: BackwardMessage, rank: int) -> tuple[Wire, list[Tensor]]:
    body, storages, _ = pack(message.gradients, Outgoing(rank)) if message.gradients else Packed(b"", [])
    # A long body is sent out of band, without a copy into the pickle.
    gradients = PickleBuffer(body) if type(body) is bytearray else body
    run = gradients, message.asks, message.done
    rest = message.marks, message.acknowledged, message.error, message.lost, message.abort
    return (*heading[:3], int(heading.mode), heading.retain_graph, *run, *rest), storages


def heading_of(wire: Wire) -> Heading:
    context, number, oldest, mode, retain_graph, *_ = wire
    return Heading(context, number, oldest, Mode(mode), retain_graph)


def opens(wire: Wire) -> bool:
    """Whether the message concerns a worker that does not know its backward; see BackwardMessage.opens."""
    return bool(wire[6] or wire[8])


def decode(wire: Wire, storages: list[Tensor], source: int) -> BackwardMessage:
    gradients, *rest = wire[5:]
    return BackwardMessage(unpack(Packed(gradients, storages), Incoming(source)) if gradients else {}, *rest)
