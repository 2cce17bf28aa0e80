"""Pairwise exchange: every rank owns one shard, reduces what the others send for it, and sends them the result.

Three ranks, shards A B C owned by ranks 0 1 2, two messages a shard (A1 A2 ...), seen from rank 0:

    send contributions      B1 to 1, C1 to 2, B2 to 1, C2 to 2
    receive contributions   A1 from 2, A1 from 1, A2 from 2, A2 from 1     folded in this order
    send results            A1 to 1, A1 to 2, A2 to 1, A2 to 2             each once all contributions are folded
    receive results         C1 from 2, B1 from 1, C2 from 2, B2 from 1     each once the own contribution has left

Every row goes on by itself, in its order, a few messages at a time. The orders agree: whatever is earliest of all
that waits, over all ranks, can move, so the exchange cannot block itself. How many messages leave at once (pace.py) is
one number for contributions and results; a result leaves only where no contribution could, so it stands in no one's
way. Each element is reduced on one rank in one order: bitwise the same everywhere and from run to run. A ring would
take as many bytes and 2 (n - 1) steps in a row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.buffers import Buffers
from hvlike.planes.pace import Pace
from hvlike.planes.partition import Message, message_length
from hvlike.planes.progress import drive, requests_of
from hvlike.planes.rows import ContributionReceiver, ContributionSender, ResultReceiver, ResultSender, Row
from hvlike.transport.dtypes import Array
from hvlike.transport.natives import Natives
from hvlike.transport.routine import Routine


class Exchange:
    """One reduction by pairwise exchange: what its four rows of messages share."""

    def __init__(
        self,
        comm: Any,
        natives: Natives,
        buffers: Buffers,
        arithmetic: Arithmetic,
        pieces: Sequence[Piece],
        raw: Sequence[Array],
        messages: Sequence[Sequence[Message]],
        window: int,
        pace: Pace,
        *,
        share: bool,
    ) -> None:
        """pieces, raw: the tensors as pieces and as bytes; messages[r]: those of the shard of rank r.

        share: send the results to all; without it they stay with their owners, and all else is only read.
        """
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.byte = natives.byte
        self.buffers = buffers
        self.arithmetic = arithmetic
        self.pieces = pieces
        self.raw = raw
        self.messages = messages
        self.contributed = [0] * self.size
        """Messages of each rank's shard for which the own contribution has left."""
        self.leaving = 0
        """Messages of any kind that are on their way from here."""
        self.pace = pace
        self.limit = 1 if pace.slow else sys.maxsize
        """How many messages may be on their way from here at once."""
        self.finished = 0
        """Messages of the own shard that hold the result."""
        self._rows: list[Row] = [ContributionReceiver(self, window), ContributionSender(self, window)]
        if share:
            self._rows += [ResultSender(self, window), ResultReceiver(self, window)]

    def run(self) -> Routine[None]:
        """Exchange and reduce; yields while nothing can move."""
        self.pace.begin()
        yield from drive(self._rows)
        # They refer to this exchange: a circle would keep the tensors until the next search for garbage.
        self._rows.clear()
        self.pace.end()

    @property
    def requests(self) -> list[Any]:
        """The MPI requests in flight; each keeps its memory alive."""
        return requests_of(self._rows)

    def nbytes(self, message: Message) -> int:
        """Bytes of a message."""
        return message_length(message) * self.arithmetic.itemsize

    def bytes_of(self, message: Message) -> list[Array]:
        """The places of a message in the tensors, as bytes."""
        itemsize = self.arithmetic.itemsize
        return [self.raw[piece][start * itemsize : stop * itemsize] for piece, start, stop in message]

    def pack(self, message: Message) -> tuple[Array, Array | None]:
        """Return the bytes of a message in a row, and the buffer they were copied to if they were not so already."""
        places = self.bytes_of(message)
        if len(places) == 1:
            return places[0], None
        buffer = self.buffers.take()
        return np.concatenate(places, out=buffer[: self.nbytes(message)]), buffer

    def unpack(self, message: Message, buffer: Array) -> None:
        """Copy the bytes of a message to their places."""
        offset = 0
        for place in self.bytes_of(message):
            np.copyto(place, buffer[offset : offset + len(place)])
            offset += len(place)
