"""One alltoall by messages: a pipeline of sends and one of receives, each with a few messages in flight.

Four ranks, seen from rank 0; every pair cut into messages 0, 1, ...:

    send       0 to 1, 0 to 2, 0 to 3, 1 to 1, 1 to 2, ...
    receive    0 from 3, 0 from 2, 0 from 1, 1 from 3, ...

The message of step s goes from r to r + s, so both its ends have it at the same place (message number, step) of their
pipelines: the earliest one that waits, over all ranks, can always move. Everything is sent and received in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.network.progress import drive, requests_of
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Array, MpiConstants, raw_view

MESSAGE_BYTES = 8 << 20
"""Large enough that the cost of a message does not count, small enough that all peers get their share of the link."""
WINDOW = 16
"""Messages in flight in each direction."""
_TAG = 3


class PairwiseAlltoall:
    """The messages of one alltoall, on one rank."""

    def __init__(
        self, comm: Any, natives: MpiConstants, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> None:
        """sends, receives: flat tensors of bytes, one per rank of `comm`; those of this rank itself are left alone."""
        rank, size = comm.Get_rank(), comm.Get_size()
        byte = natives.byte
        steps = range(1, size)
        self._rows = [
            _AlltoallPipeline(
                [((rank - step) % size, raw_view(receives[(rank - step) % size])) for step in steps],
                lambda data, peer: comm.Irecv([data, byte], peer, _TAG),
            ),
            _AlltoallPipeline(
                [((rank + step) % size, raw_view(sends[(rank + step) % size])) for step in steps],
                lambda data, peer: comm.Isend([data, byte], peer, _TAG),
            ),
        ]

    def run(self) -> Coroutine[None]:
        """Send and receive; yields while nothing can move."""
        yield from drive(self._rows)

    @property
    def requests(self) -> list[Any]:
        """The MPI requests in flight; each keeps its memory alive."""
        return requests_of(self._rows)


class _AlltoallPipeline:
    """Messages of one direction, started and ended in order."""

    def __init__(self, parts: Sequence[tuple[int, Array]], start: Callable[[Array, int], Any]) -> None:
        """parts: what goes to, or comes from, each peer."""
        self.requests: deque[Any] = deque()
        self._start = start
        longest = max((len(data) for _, data in parts), default=0)
        self._waiting = deque(
            (data[first : first + MESSAGE_BYTES], peer)
            for first in range(0, longest, MESSAGE_BYTES)
            for peer, data in parts
            if first < len(data)
        )

    @property
    def unfinished(self) -> bool:
        """Whether messages are in flight or to come."""
        return bool(self.requests or self._waiting)

    def step(self) -> bool:
        """End and start what can be; returns whether anything moved."""
        moved = False
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
            moved = True
        while self._waiting and len(self.requests) < WINDOW:
            self.requests.append(self._start(*self._waiting.popleft()))
            moved = True
        return moved
