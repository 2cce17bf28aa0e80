"""The four rows of messages of a pairwise exchange (exchange.py); each goes on by itself, in its order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvlike.planes.arithmetic import Piece
from hvlike.planes.partition import message_length
from hvlike.transport.dtypes import Array

if TYPE_CHECKING:
    from hvlike.planes.exchange import Exchange

_CONTRIBUTION_TAG = 1
_RESULT_TAG = 2


class Row(ABC):
    """Messages of one direction and purpose, started and ended in order, at most `window` at a time."""

    shift = 1
    """1: the peer of step s is rank + s; -1: it is rank - s."""

    def __init__(self, exchange: Exchange, window: int) -> None:
        self.exchange = exchange
        self.window = window
        self.requests: deque[Any] = deque()
        self._started: deque[tuple[int, int]] = deque()
        self._waiting = deque(self._order())

    def _order(self) -> list[tuple[int, int]]:
        """All (message number, peer) of the row."""
        exchange = self.exchange
        peers = [(exchange.rank + self.shift * step) % exchange.size for step in range(1, exchange.size)]
        last = max(map(len, exchange.messages))
        return [(number, peer) for number in range(last) for peer in peers if number < self._count(peer)]

    @property
    def unfinished(self) -> bool:
        """Whether messages of this row are in flight or to come."""
        return bool(self.requests or self._waiting)

    def step(self) -> bool:
        """End and start what can be; say whether anything moved."""
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


class ContributionSender(Row):
    """Sends the own contribution for every other rank's shard."""

    def __init__(self, exchange: Exchange, window: int) -> None:
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


class ContributionReceiver(Row):
    """Receives the others' contributions for the own shard and folds them, one message after the other."""

    shift = -1

    def __init__(self, exchange: Exchange, window: int) -> None:
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


class ResultSender(Row):
    """Sends the results of the own shard to all others."""

    def __init__(self, exchange: Exchange, window: int) -> None:
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


class ResultReceiver(Row):
    """Receives the results of every other shard, straight into the tensors where a message is in one place."""

    shift = -1

    def __init__(self, exchange: Exchange, window: int) -> None:
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
