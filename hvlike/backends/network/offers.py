"""Offers: one message from each member of a group to each, received into memory that is prepared before it comes.

An offer has four words, which mean nothing here, and perhaps the data of a tensor: a small one is copied into it, a
larger one follows in a message of its own, sent from where it lies. Whatever has been sent is received, in memory that
is prepared here, also where the receiver does something else and drops it: no message is left over. The receive of a
larger one is posted before it is offered, so MPI asks for its bytes as soon as it hears of them.

A rank has one offer under way at a time. Its requests are persistent: made once for each length, started again and
again, which takes MPI half the time where its caches are cold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvlike.backends.network.progress import BufferPool, has_ended
from hvlike.transport.loop.coroutine import Wait
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.memory.never_freed import ABANDONED_REQUEST, keep_forever
from hvlike.transport.messages.traffic import Traffic

WORDS = 4
_TAG, _DATA_TAG, _RESULT_TAG = 1, 2, 3
_HEADER_BYTES = 8 * (WORDS + 1)  # The last one: how many bytes of data there are
_MOST_LENGTHS = 256  # Lengths of offers whose requests are kept; with one more all are made anew


class Data(NamedTuple):
    """What a peer has sent with an offer."""

    array: Array
    arriving: list[Any]  # The request of MPI, until it is there


Handler = Callable[[int, tuple[int, ...], Data | None], None]


class Offers:
    """Used from inside the loop only. It is polled there until it is closed."""

    def __init__(
        self, comm: Any, byte: Any, ranks: Mapping[int, int], sizes: tuple[int, int], traffic: Traffic, hear: Handler
    ) -> None:
        """Receive from now on.

        Args:
            comm: A communicator that nothing else uses; it is this object's from now on.
            byte: MPI's datatype of a byte.
            ranks: What the other ranks of `comm` are called.
            sizes: The most bytes of data in an offer, and behind it.
            traffic: Where messages are counted.
            hear: Told of an offer: whose it is, its words and its data, which may still be arriving.
        """
        nbytes, self._following = sizes
        self._comm = comm
        self._byte = byte
        self._ranks = ranks
        self._traffic = traffic
        self._hear = hear
        self._most = nbytes
        self._pool = BufferPool()  # For data that follow
        self._pool.require(self._following)
        self._arriving: deque[Data] = deque()
        self._posted: dict[int, tuple[Array, Any]] = {}  # Of each peer: where its next data go, and MPI's request
        self._buffer = np.zeros(_HEADER_BYTES + nbytes, np.uint8)
        self._words = self._buffer[:_HEADER_BYTES].data.cast("Q")
        self._sends: dict[int, list[Any]] = {}
        self.leaving: list[Any] = []  # The requests of the offer of this rank, until it has left
        self._receives: list[tuple[int, int, Array, memoryview, Any]] = []
        for peer, rank in ranks.items():
            buffer = np.zeros(_HEADER_BYTES + nbytes, np.uint8)
            request = comm.Recv_init([buffer, byte], peer, _TAG)
            request.Start()
            self._receives.append((peer, rank, buffer, buffer[:_HEADER_BYTES].data.cast("Q"), request))
            self._post(peer)

    def send(self, words: tuple[int, int, int, int], data: Array | None) -> None:
        """Send an offer to all others, after `sent`; large data are read until it is sent again."""
        nbytes = 0 if data is None else len(data)
        inside = nbytes <= self._most
        mine = self._words
        mine[0], mine[1], mine[2], mine[3] = words
        mine[4] = nbytes
        end = _HEADER_BYTES + nbytes * inside
        if data is not None and inside:
            self._buffer[_HEADER_BYTES:end] = data
        sends = self._sends.get(end) or self._make(end)
        for request in sends:
            request.Start()
        self.leaving = leaving = list(sends)
        if not inside:
            leaving += [self._comm.Isend([data, self._byte], peer, _DATA_TAG) for peer in self._ranks]
        self._traffic.data_messages += len(leaving)
        self._traffic.data_bytes += len(sends) * (_HEADER_BYTES + nbytes)

    def sent(self) -> bool:
        """Whether the offer of this rank has left."""
        leaving = self.leaving
        while leaving and leaving[-1].Test():
            leaving.pop()
        return not leaving

    def progress(self, rung: bool = True) -> Wait:
        """Take what has come."""
        arriving = self._arriving
        wait = Wait.NOTIFY if (not self.leaving or self.sent()) and not arriving else Wait.POLL
        while arriving and has_ended(arriving[0].arriving[0]):
            arriving.popleft().arriving.clear()
            wait = Wait.AGAIN
        for peer, rank, buffer, words, request in self._receives:
            if request.Test():
                nbytes, data = words[4], None
                if nbytes > self._most:
                    data = self._receive(peer, nbytes)
                elif nbytes:
                    data = Data(buffer[_HEADER_BYTES : _HEADER_BYTES + nbytes].copy(), [])
                heard = tuple(words[:WORDS])
                request.Start()
                self._hear(rank, heard, data)
                wait = Wait.AGAIN
        return wait

    def is_unfinished(self) -> bool:
        return bool(self._arriving or (self.leaving and not self.sent()))

    def give(self, data: Data) -> None:
        """The data of an offer are not used any more."""
        if len(data.array) > self._most:
            self._pool.give(data.array.base)

    def send_result(self, peer: int, result: Array) -> Any:
        """What comes of offers that agree. Returns the request of MPI, as `receive_result` does."""
        self._traffic.data_messages += 1
        self._traffic.data_bytes += len(result)
        return self._comm.Isend([result, self._byte], peer, _RESULT_TAG)

    def receive_result(self, peer: int, place: Array) -> Any:
        return self._comm.Irecv([place, self._byte], peer, _RESULT_TAG)

    def keep(self, *used: object) -> None:
        """MPI may still use these, and their owner gives them up."""
        keep_forever(ABANDONED_REQUEST, *used)

    def close(self) -> None:
        """Give everything back, unless an offer or its data may still be under way."""
        receives, self._receives = self._receives, []
        if self.is_unfinished():
            keep_forever(
                ABANDONED_REQUEST, self._comm, self._buffer, self._sends, receives, self._posted, [*self._arriving]
            )
            self.leaving = []
            return
        for *_, request in receives:
            request.Cancel()
            request.Wait()
            request.Free()
        for _, request in self._posted.values():
            request.Cancel()
            request.Wait()
        self._free()
        self._comm.Free()

    def _receive(self, peer: int, nbytes: int) -> Data:
        array, request = self._posted[peer]
        data = Data(array[:nbytes], [request])
        self._arriving.append(data)
        self._post(peer)
        return data

    def _post(self, peer: int) -> None:
        if self._following:
            array = self._pool.take()
            self._posted[peer] = array, self._comm.Irecv([array, self._byte], peer, _DATA_TAG)

    def _make(self, end: int) -> list[Any]:
        if len(self._sends) >= _MOST_LENGTHS:
            self._free()
        made = [self._comm.Send_init([self._buffer[:end], self._byte], peer, _TAG) for peer in self._ranks]
        self._sends[end] = made
        return made

    def _free(self) -> None:
        for sends in self._sends.values():
            for request in sends:
                request.Free()
        self._sends.clear()
