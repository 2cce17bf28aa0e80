"""Pairwise exchange: every rank owns one shard, reduces what the others send for it, and sends them the result.

Three ranks, shards A B C owned by ranks 0 1 2, two messages a shard (A1 A2 ...), seen from rank 0:

    send contributions      B1 to 1, C1 to 2, B2 to 1, C2 to 2
    receive contributions   A1 from 2, A1 from 1, A2 from 2, A2 from 1     folded in this order
    send results            A1 to 1, A1 to 2, A2 to 1, A2 to 2             each once all contributions are folded
    receive results         C1 from 2, B1 from 1, C2 from 2, B2 from 1     each once the own contribution has left

Every pipeline goes on by itself, in its order, a few messages at a time. The orders agree: the earliest message that
waits, over all ranks, can always move, so the exchange cannot block itself. How many messages leave at once
(progress.py) is one number for contributions and results. A result leaves only where no contribution could. Each
element is reduced on one rank in one order: bitwise the same everywhere and from run to run. A ring would take as many
bytes and 2 (n - 1) steps.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.network.partition import Message, message_length
from hvlike.backends.network.progress import BandwidthEstimator, BufferPool, drive, requests_of
from hvlike.transport.loop.coroutine import Coroutine, complete
from hvlike.transport.memory.dtypes import Array, MpiConstants

_CONTRIBUTION_TAG = 1
_RESULT_TAG = 2


class MessagePipeline(ABC):
    """Messages of one direction and purpose, started and ended in order, at most `window` at a time."""

    shift = 1
    """1: the peer of step s is rank + s; -1: it is rank - s."""

    def __init__(self, exchange: PairwiseExchange, window: int) -> None:
        self.exchange = exchange
        self.window = window
        self.requests: deque[Any] = deque()
        self._started: deque[tuple[int, int]] = deque()
        self._waiting = deque(self._order())

    def _order(self) -> list[tuple[int, int]]:
        """All (message number, peer) of the pipeline, in order."""
        exchange = self.exchange
        peers = [(exchange.rank + self.shift * step) % exchange.size for step in range(1, exchange.size)]
        last = max(map(len, exchange.messages))
        return [(number, peer) for number in range(last) for peer in peers if number < self._count(peer)]

    @property
    def unfinished(self) -> bool:
        """Whether messages of this pipeline are in flight or to come."""
        return bool(self.requests or self._waiting)

    def step(self) -> bool:
        """End and start what can be; returns whether anything moved."""
        moved = False
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
            self.end(*self._started.popleft())
            moved = True
        while self._waiting and len(self.requests) < self.window and self.ready(*self._waiting[0]):
            each = self._waiting.popleft()
            self.requests.append(self.start(*each))
            self._started.append(each)
            moved = True
        return moved

    @abstractmethod
    def _count(self, peer: int) -> int:
        """How many messages go to or come from `peer`."""

    def ready(self, number: int, peer: int) -> bool:
        """Whether message `number` may be started."""
        return True

    @abstractmethod
    def start(self, number: int, peer: int) -> Any:
        """Start message `number` and return its request."""

    @abstractmethod
    def end(self, number: int, peer: int) -> None:
        """Do what follows once message `number` has arrived or left."""


class ContributionSender(MessagePipeline):
    """Sends the own contribution for every other rank's shard."""

    def __init__(self, exchange: PairwiseExchange, window: int) -> None:
        super().__init__(exchange, window)
        self._packed: deque[Array | None] = deque()

    def _count(self, peer: int) -> int:
        return len(self.exchange.messages[peer])

    def ready(self, number: int, peer: int) -> bool:
        return self.exchange.leaving < self.exchange.limit

    def start(self, number: int, peer: int) -> Any:
        exchange = self.exchange
        data, buffer = exchange.pack(exchange.messages[peer][number])
        self._packed.append(buffer)
        exchange.leaving += 1
        return exchange.comm.Isend([data, exchange.byte], peer, _CONTRIBUTION_TAG)

    def end(self, number: int, peer: int) -> None:
        buffer = self._packed.popleft()
        if buffer is not None:
            self.exchange.buffers.give(buffer)
        self.exchange.leaving -= 1
        self.exchange.contributed[peer] += 1


class ContributionReceiver(MessagePipeline):
    """Receives the others' contributions for the own shard and folds them, one message after the other."""

    shift = -1

    def __init__(self, exchange: PairwiseExchange, window: int) -> None:
        super().__init__(exchange, window)
        own = exchange.messages[exchange.rank]
        longest = max(map(message_length, own), default=0)
        self._memory = exchange.buffers.accumulator(exchange.arithmetic, longest)
        self._slots: deque[Array] = deque()
        self._accumulators: list[Piece] = []
        self._folded = 0

    def _count(self, peer: int) -> int:
        return len(self.exchange.messages[self.exchange.rank])

    def start(self, number: int, peer: int) -> Any:
        exchange = self.exchange
        buffer = exchange.buffers.take()
        self._slots.append(buffer)
        size = exchange.nbytes(exchange.messages[exchange.rank][number])
        return exchange.comm.Irecv([buffer[:size], exchange.byte], peer, _CONTRIBUTION_TAG)

    def end(self, number: int, peer: int) -> None:
        exchange = self.exchange
        message = exchange.messages[exchange.rank][number]
        exchange.pace.arrived(exchange.nbytes(message))
        own = [exchange.pieces[piece][start:stop] for piece, start, stop in message]
        buffer = self._slots.popleft()
        others = _split(exchange.arithmetic.over(buffer[: exchange.nbytes(message)]), own)
        if exchange.size == 2:
            for piece, other in zip(own, others, strict=True):
                exchange.arithmetic.combine(piece, [other])
            exchange.finished += 1
        else:
            self._fold(own, others)
        exchange.buffers.give(buffer)

    def _fold(self, own: Sequence[Piece], others: Sequence[Piece]) -> None:
        """Fold one of several contributions; the last one makes the result."""
        arithmetic = self.exchange.arithmetic
        if not self._folded:
            self._begin(own)
        for accumulator, other in zip(self._accumulators, others, strict=True):
            arithmetic.fold(accumulator, other)
        self._folded += 1
        if self._folded == self.exchange.size - 1:
            for accumulator, piece in zip(self._accumulators, own, strict=True):
                arithmetic.end(accumulator, piece)
            self._folded = 0
            self.exchange.finished += 1

    def _begin(self, own: Sequence[Piece]) -> None:
        """Load the own contribution; where memory is needed each run has its part of it."""
        self._accumulators = []
        offset = 0
        for piece in own:
            memory = None if self._memory is None else self._memory[offset:]
            self._accumulators.append(self.exchange.arithmetic.begin(piece, memory))
            offset += len(piece)


def _split(whole: Piece, parts: Sequence[Piece]) -> list[Piece]:
    """Cut a piece into pieces of the lengths of `parts`."""
    result = []
    offset = 0
    for part in parts:
        result.append(whole[offset : offset + len(part)])
        offset += len(part)
    return result


class ResultSender(MessagePipeline):
    """Sends the results of the own shard to all others."""

    def __init__(self, exchange: PairwiseExchange, window: int) -> None:
        super().__init__(exchange, window)
        self._packed: deque[tuple[Array, Array | None]] = deque()
        self._last_peer = (exchange.rank - 1) % exchange.size
        self._last_packed = -1

    def _count(self, peer: int) -> int:
        return len(self.exchange.messages[self.exchange.rank])

    def ready(self, number: int, peer: int) -> bool:
        return self.exchange.finished > number and self.exchange.leaving < self.exchange.limit

    def start(self, number: int, peer: int) -> Any:
        exchange = self.exchange
        if number > self._last_packed:
            self._packed.append(exchange.pack(exchange.messages[exchange.rank][number]))
            self._last_packed = number
        data, _ = self._packed[-1]
        exchange.leaving += 1
        return exchange.comm.Isend([data, exchange.byte], peer, _RESULT_TAG)

    def end(self, number: int, peer: int) -> None:
        self.exchange.leaving -= 1
        if peer == self._last_peer:
            _, buffer = self._packed.popleft()
            if buffer is not None:
                self.exchange.buffers.give(buffer)


class ResultReceiver(MessagePipeline):
    """Receives the results of every other shard, straight into the tensors where a message is in one place."""

    shift = -1

    def __init__(self, exchange: PairwiseExchange, window: int) -> None:
        super().__init__(exchange, window)
        self._slots: deque[Array | None] = deque()

    def _count(self, peer: int) -> int:
        return len(self.exchange.messages[peer])

    def ready(self, number: int, peer: int) -> bool:
        # MPI still reads the own contribution from the place where the result goes.
        return self.exchange.contributed[peer] > number

    def start(self, number: int, peer: int) -> Any:
        exchange = self.exchange
        message = exchange.messages[peer][number]
        slot = exchange.buffers.take() if len(message) > 1 else None
        self._slots.append(slot)
        target = exchange.bytes_of(message)[0] if slot is None else slot[: exchange.nbytes(message)]
        return exchange.comm.Irecv([target, exchange.byte], peer, _RESULT_TAG)

    def end(self, number: int, peer: int) -> None:
        exchange = self.exchange
        message = exchange.messages[peer][number]
        exchange.pace.arrived(exchange.nbytes(message))
        slot = self._slots.popleft()
        if slot is not None:
            exchange.unpack(message, slot)
            exchange.buffers.give(slot)


class PairwiseExchange:
    """One reduction by pairwise exchange: what its four pipelines of messages share."""

    def __init__(
        self,
        comm: Any,
        natives: MpiConstants,
        buffers: BufferPool,
        arithmetic: Arithmetic,
        pieces: Sequence[Piece],
        raw: Sequence[Array],
        messages: Sequence[Sequence[Message]],
        window: int,
        pace: BandwidthEstimator,
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
        self._rows: list[MessagePipeline] = [ContributionReceiver(self, window), ContributionSender(self, window)]
        if share:
            self._rows += [ResultSender(self, window), ResultReceiver(self, window)]

    def run(self) -> Coroutine[None]:
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
        """Return the contiguous bytes of a message, and the buffer they were copied to, if any."""
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


_SWAP_TAG = 4


class Swap:
    """One reduction between the two ranks of a communicator."""

    def __init__(self, comm: Any, natives: MpiConstants, buffers: BufferPool, size: int) -> None:
        """size: bytes of all tensors together."""
        self.requests: list[Any] = []
        self._comm = comm
        self._byte = natives.byte
        self._buffers = buffers
        self._size = size

    def run(self, pieces: Sequence[Piece], raw: Sequence[Array], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce tensors, given as pieces and as bytes, in place; yields while nothing can move."""
        buffers, size = self._buffers, self._size
        rank: int = self._comm.Get_rank()
        theirs, packed = buffers.take(), None
        data = raw[0]
        if len(raw) > 1:
            packed = buffers.take()
            data = np.concatenate(raw, out=packed[:size])
        self.requests.append(self._comm.Irecv([theirs[:size], self._byte], 1 - rank, _SWAP_TAG))
        self.requests.append(self._comm.Isend([data, self._byte], 1 - rank, _SWAP_TAG))
        yield from complete(self.requests)
        other = arithmetic.over(theirs[:size])
        offset = 0
        for piece in pieces:
            part = other[offset : offset + len(piece)]
            if rank == 0:
                arithmetic.combine(piece, [part])
            else:
                # The order of the other rank: a NaN keeps the same bits on both.
                arithmetic.combine(part, [piece], [piece])
            offset += len(piece)
        buffers.give(theirs)
        if packed is not None:
            buffers.give(packed)
