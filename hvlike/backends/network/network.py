"""The network backend: ranks on different nodes reduce and move tensors by MPI messages, polled, never blocking.

Small reductions are one message each way between two nodes (swap); among more they are MPI's own, on one flat
buffer, where MPI computes the type right. All others are a pairwise exchange. 16-bit floats are summed
in float32 and rounded once in every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import ordinary_tensor
from hvlike.backends.arithmetic.reduce_op import LIBRARY_NAMES
from hvlike.backends.network.pairwise_reduction import PairwiseExchange, split, swap
from hvlike.backends.network.partition import Run, message_elements, messages, shards
from hvlike.backends.network.progress import BandwidthEstimator, BufferPool, MessagePipeline, drive
from hvlike.transport.loop.coroutine import Coroutine, complete
from hvlike.transport.memory.dtypes import Array, Kind, MpiConstants, raw_view

SMALL_BYTES = 512 << 10
"""Up to this MPI's own reduction is as fast as the exchange, or faster; not for 16-bit floats: it doubles the bytes."""
SMALLEST_SHARD = 32 << 10
"""Below this an exchange is all latency: it sends 2 (n - 1) messages where MPI's reduction takes log n steps."""
SWAP_BYTES = 2 << 20  # Up to this two ranks swap all they have: half the steps of an exchange, twice its arithmetic
LARGEST_MESSAGE = 4 << 20
SMALLEST_MESSAGE = 256 << 10
BUFFER_BYTES = 16 << 20  # About how much memory the messages being received take, at any number of ranks
ALLTOALL_BYTES = 8 << 20
"""Large enough that the cost of a message does not count, small enough that all peers get their share of the link."""
ALLTOALL_WINDOW = 16  # Messages in flight in each direction
_ALLTOALL_TAG = 3
BROADCAST_BYTES = 1 << 30  # Counts of 2^31 fail in Open MPI
# MPI may still write to the memory of an abandoned request: it must never be freed.
_ABANDONED: list[Any] = []


class Network:
    """Reductions and gathers over one communicator; one call at a time, in the same order on all its ranks."""

    def __init__(self, comm: Any) -> None:
        """comm: an intracommunicator of mpi4py that returns errors; it is this object's from now on."""
        self._comm = comm
        self._size: int = comm.Get_size()
        self._natives = MpiConstants()
        self._buffers = BufferPool()
        self.bandwidth = BandwidthEstimator()  # Limits how many messages are in flight
        self._flat: Array = np.empty(0, np.uint8)
        self._broken = False

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        pieces = [arithmetic.view(tensor) for tensor in tensors]
        if self._size == 1:
            for piece in pieces:
                arithmetic.combine(piece, [])
        elif pieces:
            yield from self._reduce(pieces, tensors, arithmetic)

    def _reduce(
        self, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        size = sum(map(len, pieces)) * arithmetic.itemsize
        if self._size == 2 and size <= SWAP_BYTES:
            self._buffers.require(size)
            requests: list[Any] = []
            raw = _bytes_of(pieces, tensors)
            steps = swap(self._comm, self._natives.byte, self._buffers, arithmetic, pieces, raw, requests)
            yield from self._keep(steps, requests)
            return
        half = arithmetic.element.kind is Kind.HALF
        wide = arithmetic.on(torch.float32) if half else arithmetic
        native = self._natives.reduction(wide.dtype, LIBRARY_NAMES[wide.op].upper())
        small = max(SMALLEST_SHARD * self._size, 0 if half else SMALL_BYTES)
        if native is not None and size <= small:
            yield from self._reduce_flat(pieces, wide, *native)
        else:
            owned = shards([len(piece) for piece in pieces], self._size)
            yield from self._exchange(pieces, _bytes_of(pieces, tensors), arithmetic, owned, share=True)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        owned: list[list[Run]] = [[] for _ in range(self._size)]
        for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            if len(tensor):
                owned[owner].append(Run(index, 0, len(tensor)))
        pieces = [arithmetic.view(tensor) for tensor in tensors]
        if self._size == 1:
            for piece in pieces:
                arithmetic.combine(piece, [])
        elif any(owned):
            yield from self._exchange(pieces, _bytes_of(pieces, tensors), arithmetic, owned, share=False)

    def gather(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> Coroutine[None]:
        if self._size == 1:
            return
        requests: list[Any] = []
        for owner, tensor in pieces:
            raw = raw_view(tensor)
            for start in range(0, len(raw), BROADCAST_BYTES):
                run = raw[start : start + BROADCAST_BYTES]
                requests.append(self._comm.Ibcast([run, self._natives.byte], owner))
        yield from self._keep(complete(requests), requests)

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        rank: int = self._comm.Get_rank()
        receives[rank].copy_(sends[rank])
        pipelines = pairwise_alltoall(self._comm, self._natives.byte, sends, receives)
        yield from self._keep(drive(pipelines), *(each.requests for each in pipelines))

    def close(self) -> None:
        """Free the communicator, unless messages of a coroutine that was given up may still arrive on it."""
        if self._comm is not None and not self._broken:
            self._comm.Free()
        self._comm = None

    def _reduce_flat(self, pieces: Sequence[Piece], arithmetic: Arithmetic, datatype: Any, op: Any) -> Coroutine[None]:
        """Reduce by MPI on one flat buffer; `arithmetic` is that of the buffer, wider than 16-bit pieces."""
        flat, places = pieces[0], []
        if len(pieces) > 1 or not isinstance(flat, np.ndarray):
            size = sum(map(len, pieces)) * arithmetic.itemsize
            if len(self._flat) < size:
                self._flat = np.empty(size, np.uint8)
            flat = self._flat[:size].view(arithmetic.element.storage)
            places = list(zip(split(flat, pieces), pieces, strict=True))
        for place, piece in places:
            _convert(place, piece)
        if arithmetic.factors.prescale != 1:
            arithmetic.combine(flat, [], partial=True)
        request = self._comm.Iallreduce(self._natives.in_place, [flat.view(np.uint8), len(flat), datatype], op)
        yield from self._keep(complete([request]), [request])
        arithmetic.continuation.combine(flat, [])
        for place, piece in places:
            _convert(piece, place)

    def _exchange(
        self,
        pieces: Sequence[Piece],
        raw: Sequence[Array],
        arithmetic: Arithmetic,
        owned: Sequence[Sequence[Run]],
        *,
        share: bool,
    ) -> Coroutine[None]:
        total = sum(map(len, pieces))
        elements = message_elements(
            total, self._size, arithmetic.itemsize, largest=LARGEST_MESSAGE, smallest=SMALLEST_MESSAGE
        )
        parts = [messages(runs, elements) for runs in owned]
        size = elements * arithmetic.itemsize
        self._buffers.require(size)
        window = max(4, min(2 * (self._size - 1), BUFFER_BYTES // size))
        exchange = PairwiseExchange(
            self._comm,
            self._natives.byte,
            self._buffers,
            arithmetic,
            pieces,
            raw,
            parts,
            window,
            self.bandwidth,
            share=share,
        )
        yield from self._keep(exchange.run(), *(each.requests for each in exchange.pipelines))

    def _keep(self, coroutine: Coroutine[None], *requests: Iterable[Any]) -> Coroutine[None]:
        """Run `coroutine`; if it is given up or fails, keep its requests and their memory for ever."""
        ended = False
        try:
            yield from coroutine
            ended = True
        finally:
            if not ended:
                _ABANDONED.extend(chain(*requests))
                self._broken = True


def pairwise_alltoall(
    comm: Any, byte: Any, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> list[MessagePipeline]:
    """A pipeline of sends and one of receives, each with a few messages in flight; flat tensors of bytes, one per rank.

    Four ranks, seen from rank 0; every pair cut into messages 0, 1, ...:

        send       0 to 1, 0 to 2, 0 to 3, 1 to 1, 1 to 2, ...
        receive    0 from 3, 0 from 2, 0 from 1, 1 from 3, ...

    The message of step s goes from r to r + s, so both its ends have it at the same place (message number, step) of
    their pipelines: the earliest one that waits, over all ranks, can always move. All is sent and received in place.
    """
    rank, size = comm.Get_rank(), comm.Get_size()

    def pipeline(call: Callable[..., Any], tensors: Sequence[torch.Tensor], shift: int) -> MessagePipeline:
        peers = [(rank + shift * step) % size for step in range(1, size)]
        views = {peer: raw_view(tensors[peer]) for peer in peers}
        longest = max((len(view) for view in views.values()), default=0)

        def start(first: int, peer: int) -> Any:
            return call([views[peer][first : first + ALLTOALL_BYTES], byte], peer, _ALLTOALL_TAG)

        firsts = range(0, longest, ALLTOALL_BYTES)
        return MessagePipeline(
            ((first, peer) for first in firsts for peer in peers if first < len(views[peer])), ALLTOALL_WINDOW, start
        )

    return [pipeline(comm.Irecv, receives, -1), pipeline(comm.Isend, sends, 1)]


def _bytes_of(pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> list[Array]:
    return [
        piece.view(np.uint8) if isinstance(piece, np.ndarray) else raw_view(tensor)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]


def _convert(target: Piece, source: Piece) -> None:
    """Copy a piece; to or from float32 where one side is a 16-bit float."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(target, source)
    else:
        _as_tensor(target).copy_(_as_tensor(source))


def _as_tensor(piece: Piece) -> torch.Tensor:
    return ordinary_tensor(piece, torch.float32) if isinstance(piece, np.ndarray) else piece
