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
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.network.partition import Message, message_length
from hvlike.backends.network.progress import BandwidthEstimator, BufferPool, MessagePipeline, drive
from hvlike.transport.loop.coroutine import Coroutine, complete
from hvlike.transport.memory.dtypes import Array

_CONTRIBUTION_TAG, _RESULT_TAG, _SWAP_TAG = 1, 2, 4


class PairwiseExchange:
    def __init__(
        self,
        comm: Any,
        byte: Any,
        buffers: BufferPool,
        arithmetic: Arithmetic,
        pieces: Sequence[Piece],
        raw: Sequence[Array],
        messages: Sequence[Sequence[Message]],
        window: int,
        bandwidth: BandwidthEstimator,
        *,
        share: bool,
    ) -> None:
        """pieces, raw: the tensors as pieces and as bytes. messages[r]: those of the shard of rank r. window: how many
        of a kind may be in flight. share: send the results to all; without it they stay with their owners.
        """
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._byte = byte
        self._buffers = buffers
        self._arithmetic = arithmetic
        self._pieces = pieces
        self._raw = raw
        self._messages = messages
        self._own = messages[self._rank]
        self._bandwidth = bandwidth
        self._limit = 1 if bandwidth.slow else sys.maxsize  # Messages of any kind on their way from here at once
        self._leaving = 0
        self._contributed = [0] * self._size  # Messages of each rank's shard for which the own contribution has left
        self._folded = 0  # Contributions to the message of the own shard that is being reduced
        self._finished = 0  # Messages of the own shard that hold the result
        self._memory = arithmetic.accumulator(max(map(message_length, self._own), default=0))
        self._accumulators: list[Piece] = []
        # What was taken from the pool for messages in flight, in their order.
        self._contribution_slots: deque[Array] = deque()
        self._packed_contributions: deque[Array | None] = deque()
        self._result_slots: deque[Array | None] = deque()
        self._packed_results: deque[tuple[Array, Array | None]] = deque()
        own, theirs = [len(self._own)] * self._size, [len(each) for each in messages]
        self.pipelines = [
            MessagePipeline(self._order(own, -1), window, self._receive_contribution, self._fold),
            MessagePipeline(
                self._order(theirs, 1), window, self._send_contribution, self._contribution_left, self._may_leave
            ),
        ]
        if share:
            self.pipelines += [
                MessagePipeline(self._order(own, 1), window, self._send_result, self._result_left, self._is_finished),
                MessagePipeline(
                    self._order(theirs, -1), window, self._receive_result, self._take_result, self._has_contributed
                ),
            ]

    def run(self) -> Coroutine[None]:
        self._bandwidth.begin()
        yield from drive(self.pipelines)
        # They refer to this exchange: a circle would keep the tensors until the next search for garbage.
        self.pipelines.clear()
        self._bandwidth.end()

    def _order(self, counts: Sequence[int], shift: int) -> list[tuple[int, int]]:
        """All (message number, peer) of a pipeline; counts: messages for each rank; step s: with rank + shift * s."""
        peers = [(self._rank + shift * step) % self._size for step in range(1, self._size)]
        return [(number, peer) for number in range(max(counts)) for peer in peers if number < counts[peer]]

    # -- contributions --------------------------------------------------------------------------

    def _may_leave(self, number: int, peer: int) -> bool:
        return self._leaving < self._limit

    def _send_contribution(self, number: int, peer: int) -> Any:
        data, buffer = self._pack(self._messages[peer][number])
        self._packed_contributions.append(buffer)
        self._leaving += 1
        return self._comm.Isend([data, self._byte], peer, _CONTRIBUTION_TAG)

    def _contribution_left(self, number: int, peer: int) -> None:
        self._buffers.give(self._packed_contributions.popleft())
        self._leaving -= 1
        self._contributed[peer] += 1

    def _receive_contribution(self, number: int, peer: int) -> Any:
        buffer = self._buffers.take()
        self._contribution_slots.append(buffer)
        return self._comm.Irecv([buffer[: self._nbytes(self._own[number])], self._byte], peer, _CONTRIBUTION_TAG)

    def _fold(self, number: int, peer: int) -> None:
        """Fold one contribution to a message of the own shard; the last one makes the result."""
        message, arithmetic = self._own[number], self._arithmetic
        nbytes = self._nbytes(message)
        self._bandwidth.arrived(nbytes)
        own = [self._pieces[piece][start:stop] for piece, start, stop in message]
        buffer = self._contribution_slots.popleft()
        others = split(arithmetic.over(buffer[:nbytes]), own)
        if self._size == 2:
            for piece, other in zip(own, others, strict=True):
                arithmetic.combine(piece, [other])
        else:
            if not self._folded:
                # Where memory is needed each run has its part of it.
                memory = [None] * len(own) if self._memory is None else split(self._memory, own)
                self._accumulators = [arithmetic.begin(*each) for each in zip(own, memory, strict=True)]
            for accumulator, other in zip(self._accumulators, others, strict=True):
                arithmetic.fold(accumulator, other)
        self._folded += 1
        if self._folded == self._size - 1:
            for accumulator, piece in zip(self._accumulators, own, strict=False):
                arithmetic.end(accumulator, piece)
            self._folded = 0
            self._finished += 1
        self._buffers.give(buffer)

    # -- results --------------------------------------------------------------------------------

    def _is_finished(self, number: int, peer: int) -> bool:
        return self._finished > number and self._leaving < self._limit

    def _send_result(self, number: int, peer: int) -> Any:
        if peer == (self._rank + 1) % self._size:
            self._packed_results.append(self._pack(self._own[number]))
        data, _ = self._packed_results[-1]
        self._leaving += 1
        return self._comm.Isend([data, self._byte], peer, _RESULT_TAG)

    def _result_left(self, number: int, peer: int) -> None:
        self._leaving -= 1
        if peer == (self._rank - 1) % self._size:
            self._buffers.give(self._packed_results.popleft()[1])

    def _has_contributed(self, number: int, peer: int) -> bool:
        # Until then MPI still reads the own contribution from the place where the result goes.
        return self._contributed[peer] > number

    def _receive_result(self, number: int, peer: int) -> Any:
        """Straight into the tensors where a message is in one place."""
        message = self._messages[peer][number]
        slot = self._buffers.take() if len(message) > 1 else None
        self._result_slots.append(slot)
        target = self._bytes_of(message)[0] if slot is None else slot[: self._nbytes(message)]
        return self._comm.Irecv([target, self._byte], peer, _RESULT_TAG)

    def _take_result(self, number: int, peer: int) -> None:
        message = self._messages[peer][number]
        self._bandwidth.arrived(self._nbytes(message))
        slot = self._result_slots.popleft()
        if slot is not None:
            places = self._bytes_of(message)
            for place, part in zip(places, split(slot, places), strict=True):
                np.copyto(place, part)
        self._buffers.give(slot)

    # -- messages -------------------------------------------------------------------------------

    def _nbytes(self, message: Message) -> int:
        return message_length(message) * self._arithmetic.itemsize

    def _bytes_of(self, message: Message) -> list[Array]:
        itemsize = self._arithmetic.itemsize
        return [self._raw[piece][start * itemsize : stop * itemsize] for piece, start, stop in message]

    def _pack(self, message: Message) -> tuple[Array, Array | None]:
        """Return the contiguous bytes of a message, and the buffer they were copied to, if any."""
        places = self._bytes_of(message)
        if len(places) == 1:
            return places[0], None
        buffer = self._buffers.take()
        return np.concatenate(places, out=buffer[: self._nbytes(message)]), buffer


def split(whole: Piece, parts: Sequence[Piece]) -> list[Piece]:
    """Cut a piece into pieces of the lengths of `parts`; what is left over is left out."""
    ends = [0, *accumulate(map(len, parts))]
    return [whole[start:end] for start, end in pairwise(ends)]


def swap(
    comm: Any,
    byte: Any,
    buffers: BufferPool,
    arithmetic: Arithmetic,
    pieces: Sequence[Piece],
    raw: Sequence[Array],
    requests: list[Any],
) -> Coroutine[None]:
    """Reduce between two ranks that send each other all they have. requests: filled with those of MPI in flight."""
    size = sum(map(len, raw))
    rank: int = comm.Get_rank()
    theirs, packed = buffers.take(), None
    data = raw[0]
    if len(raw) > 1:
        packed = buffers.take()
        data = np.concatenate(raw, out=packed[:size])
    requests.append(comm.Irecv([theirs[:size], byte], 1 - rank, _SWAP_TAG))
    requests.append(comm.Isend([data, byte], 1 - rank, _SWAP_TAG))
    yield from complete(requests)
    for piece, part in zip(pieces, split(arithmetic.over(theirs[:size]), pieces), strict=True):
        if rank == 0:
            arithmetic.combine(piece, [part])
        else:
            # The order of the other rank: a NaN keeps the same bits on both.
            arithmetic.combine(part, [piece], [piece])
    buffers.give(theirs)
    buffers.give(packed)
