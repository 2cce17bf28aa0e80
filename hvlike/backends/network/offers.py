"""Offers: one message from each member of a group to each, received into memory that is prepared before it comes.

An offer has four words, which mean nothing here, and perhaps the data of a small tensor. A rank has one offer under way
at a time. Its requests are persistent: made once for each length, started again and again, which takes MPI
half the time where its caches are cold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvlike.transport.loop.coroutine import Wait
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.messages.traffic import Traffic

WORDS = 4
_TAG = 1
_HEADER_BYTES = 8 * (WORDS + 1)  # The last one: how many bytes of data follow
_MOST_LENGTHS = 256  # Lengths of offers whose requests are kept; with one more all are made anew
# MPI may still use the memory of an abandoned request: it must never be freed.
_ABANDONED: list[Any] = []

Handler = Callable[[int, tuple[int, ...], Array | None], None]


class Offers:
    """Used from inside the loop only. It is polled there until it is closed."""

    def __init__(
        self, comm: Any, byte: Any, ranks: Mapping[int, int], nbytes: int, traffic: Traffic, hear: Handler
    ) -> None:
        """Receive from now on.

        Args:
            comm: A communicator that nothing else uses; it is this object's from now on.
            byte: MPI's datatype of a byte.
            ranks: What the other ranks of `comm` are called.
            nbytes: The most data in an offer.
            traffic: Where messages are counted.
            hear: Told of an offer: whose it is, its words and its data.
        """
        self._comm = comm
        self._byte = byte
        self._ranks = ranks
        self._traffic = traffic
        self._hear = hear
        self._buffer = np.zeros(_HEADER_BYTES + nbytes, np.uint8)
        self._words = self._buffer[:_HEADER_BYTES].data.cast("Q")
        self._sends: dict[int, list[Any]] = {}
        self.leaving: list[Any] = []  # The requests of the offer of this rank, until it has left
        self._receives: list[tuple[int, Array, memoryview, Any]] = []
        for peer, rank in ranks.items():
            buffer = np.zeros(_HEADER_BYTES + nbytes, np.uint8)
            request = comm.Recv_init([buffer, byte], peer, _TAG)
            request.Start()
            self._receives.append((rank, buffer, buffer[:_HEADER_BYTES].data.cast("Q"), request))

    def send(self, words: tuple[int, int, int, int], data: Array | None) -> None:
        """Send an offer to all others, after `sent`; the data are copied at once."""
        nbytes = 0 if data is None else len(data)
        mine = self._words
        mine[0], mine[1], mine[2], mine[3] = words
        mine[4] = nbytes
        end = _HEADER_BYTES + nbytes
        if data is not None:
            self._buffer[_HEADER_BYTES:end] = data
        sends = self._sends.get(end) or self._make(end)
        for request in sends:
            request.Start()
        self.leaving = list(sends)
        self._traffic.data_messages += len(sends)
        self._traffic.data_bytes += len(sends) * end

    def sent(self) -> bool:
        """Whether the offer of this rank has left."""
        leaving = self.leaving
        while leaving and leaving[-1].Test():
            leaving.pop()
        return not leaving

    def progress(self, rung: bool = True) -> Wait:
        """Take what has come."""
        wait = Wait.NOTIFY if not self.leaving or self.sent() else Wait.POLL
        for rank, buffer, words, request in self._receives:
            if request.Test():
                nbytes = words[4]
                data = buffer[_HEADER_BYTES : _HEADER_BYTES + nbytes].copy() if nbytes else None
                heard = tuple(words[:WORDS])
                request.Start()
                self._hear(rank, heard, data)
                wait = Wait.AGAIN
        return wait

    def is_unfinished(self) -> bool:
        return not self.sent()

    def close(self) -> None:
        """Give everything back, unless this rank's offer may still be under way."""
        receives, self._receives = self._receives, []
        if not self.sent():
            _ABANDONED.append((self._comm, self._buffer, self._sends, receives))
            self.leaving = []
            return
        for *_, request in receives:
            request.Cancel()
            request.Wait()
            request.Free()
        self._free()
        self._comm.Free()

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
