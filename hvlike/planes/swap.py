"""Swap: two ranks send each other all they have, and both reduce it, in the same order.

    rank 0   send A B   receive A' B'   A + A'   B + B'
    rank 1   send A' B'   receive A B   A + A'   B + B'

One message each way, as many bytes as any other way takes for two, and half the steps; but each rank does all the
arithmetic, so large reductions are shared out instead (exchange.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.buffers import Buffers
from hvlike.transport.dtypes import Array
from hvlike.transport.natives import Natives
from hvlike.transport.routine import Routine, complete

_TAG = 4


class Swap:
    """One reduction between the two ranks of a communicator."""

    def __init__(self, comm: Any, natives: Natives, buffers: Buffers, size: int) -> None:
        """size: bytes of all tensors together."""
        self.requests: list[Any] = []
        self._comm = comm
        self._byte = natives.byte
        self._buffers = buffers
        self._size = size

    def run(self, pieces: Sequence[Piece], raw: Sequence[Array], arithmetic: Arithmetic) -> Routine[None]:
        """Reduce tensors, given as pieces and as bytes, in place; yields while nothing can move."""
        buffers, size = self._buffers, self._size
        rank: int = self._comm.Get_rank()
        theirs, packed = buffers.take(), None
        data = raw[0]
        if len(raw) > 1:
            packed = buffers.take()
            data = np.concatenate(raw, out=packed[:size])
        self.requests.append(self._comm.Irecv([theirs[:size], self._byte], 1 - rank, _TAG))
        self.requests.append(self._comm.Isend([data, self._byte], 1 - rank, _TAG))
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
