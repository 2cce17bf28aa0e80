"""The network backend: ranks on different nodes reduce and move tensors by MPI messages, polled, never blocking.

Reductions are prepared once for the lengths of their tensors, in the way that costs least after the model
(cost_model.py): one message each way, pairwise (pairwise_reduction.py), or in several levels (recursive_reduction.py).
16-bit floats are summed in float32 and rounded once in every way.

MPI's own reductions are not among them: polled from Python they took as long as a swap or longer, their order of
summation is unknown, and they carry no header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.network.cost_model import TYPICAL, MeasuredNetwork, choose, is_direct
from hvlike.backends.network.pairwise_reduction import PairwiseReduction, SwapReduction
from hvlike.backends.network.partition import Run, shards
from hvlike.backends.network.progress import BandwidthEstimator, BufferPool, MessagePipeline, SharedScratch, drive
from hvlike.backends.network.recursive_reduction import RecursiveReduction
from hvlike.transport.loop.coroutine import Coroutine, T, complete
from hvlike.transport.memory.dtypes import Kind, MpiConstants, raw_view
from hvlike.transport.memory.never_freed import ABANDONED_REQUEST, keep_forever

ALLTOALL_BYTES = 8 << 20
"""Large enough that the cost of a message does not count, small enough that all peers get their share of the link."""
ALLTOALL_WINDOW = 16  # Messages in flight in each direction
_ALLTOALL_TAG = 3
BROADCAST_BYTES = 1 << 30  # Counts of 2^31 fail in Open MPI
MOST_KNOWN = 64  # Reductions that are kept; with one more all are prepared anew


class NetworkReduction(Protocol):
    """A PreparedReduction (backends/base.py) whose messages somebody else looks after."""

    def run(self, addresses: list[int], active: int) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses, in place; returns how many ranks are active."""

    def requests(self) -> Iterable[Any]:
        """Those of MPI that are in flight."""


class PreparedNetworkReduction:
    """See PreparedReduction (backends/base.py)."""

    def __init__(self, network: Network, reduction: NetworkReduction) -> None:
        self._network = network
        self._reduction = reduction

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        said = 1 if active is None else active
        return self._network.keep(self._reduction.run(addresses, said), self._reduction.requests, tensors)


class Network:
    """Reductions and gathers over one communicator; one call at a time, in the same order on all its ranks."""

    def __init__(self, comm: Any, ranks: Sequence[int] | None = None, constants: MeasuredNetwork = TYPICAL) -> None:
        """comm: an intracommunicator of mpi4py that returns errors; it is this object's from now on. ranks: what errors
        call its ranks. constants: of the network, the same on all its ranks.
        """
        self._comm = comm
        self._size: int = comm.Get_size()
        self.constants = constants
        self._ranks = list(range(self._size)) if ranks is None else ranks
        self._natives = MpiConstants()
        self._buffers, self._scratch = BufferPool(), SharedScratch()
        self.bandwidth = BandwidthEstimator()  # Limits how many messages are in flight
        self._prepared: dict[object, PreparedNetworkReduction] = {}
        self._broken = False

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedNetworkReduction:
        """What reduces tensors of these lengths, none 0, on two ranks or more."""
        key = (*lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        return self._known(key, lambda: self._choose(lengths, arithmetic))

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if self._size == 1:
            for tensor in tensors:
                arithmetic.combine(arithmetic.view(tensor), [])
        elif tensors:
            prepared = self.prepare(list(map(len, tensors)), arithmetic)
            yield from prepared.run(list(map(arithmetic.address, tensors)), None, tensors)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        if self._size == 1:
            for tensor in tensors:
                arithmetic.combine(arithmetic.view(tensor), [])
        elif any(map(len, tensors)):
            lengths = list(map(len, tensors))
            key = (*lengths, *owners, "scatter", arithmetic.dtype, arithmetic.op, arithmetic.factors)
            prepared = self._known(key, lambda: self._pairwise(lengths, owners, arithmetic))
            yield from prepared.run(list(map(arithmetic.address, tensors)), None, tensors)

    def _known(self, key: object, make: Callable[[], NetworkReduction]) -> PreparedNetworkReduction:
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= MOST_KNOWN:
                self._prepared.clear()
            prepared = self._prepared[key] = PreparedNetworkReduction(self, make())
        return prepared

    def _choose(self, lengths: Sequence[int], arithmetic: Arithmetic) -> NetworkReduction:
        half = arithmetic.element.kind is Kind.HALF
        way = choose(self.constants, self._size, sum(lengths) * arithmetic.itemsize, widened=2 if half else 1)
        parts = self._comm, self._natives.byte, arithmetic
        stamp = arithmetic.stamp(lengths)
        if not is_direct(way):
            return RecursiveReduction(*parts, lengths, stamp, self._ranks, way, self._scratch)
        if way.sharded:
            return self._pairwise(lengths, None, arithmetic)
        whole = [[Run(index, 0, length) for index, length in enumerate(lengths)]]
        return SwapReduction(*parts, whole, stamp, self._ranks, self.constants)

    def _pairwise(
        self, lengths: Sequence[int], owners: Sequence[int] | None, arithmetic: Arithmetic
    ) -> PairwiseReduction:
        """owners: of each tensor, which keep the results; None: each rank reduces a share for all."""
        if owners is None:
            owned = shards(lengths, self._size)
        else:
            owned = [
                [Run(index, 0, lengths[index]) for index, each in enumerate(owners) if each == rank and lengths[index]]
                for rank in range(self._size)
            ]
        return PairwiseReduction(
            self._comm,
            self._natives.byte,
            arithmetic,
            owned,
            arithmetic.stamp([*lengths, *(owners or ())]),
            self._ranks,
            self.constants,
            buffers=self._buffers,
            bandwidth=self.bandwidth,
            share=owners is None,
        )

    def gather(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> Coroutine[None]:
        if self._size == 1:
            return
        requests: list[Any] = []
        for owner, tensor in pieces:
            raw = raw_view(tensor)
            for start in range(0, len(raw), BROADCAST_BYTES):
                run = raw[start : start + BROADCAST_BYTES]
                requests.append(self._comm.Ibcast([run, self._natives.byte], owner))
        yield from self.keep(complete(requests), lambda: requests)

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        rank: int = self._comm.Get_rank()
        receives[rank].copy_(sends[rank])
        pipelines = pairwise_alltoall(self._comm, self._natives.byte, sends, receives)
        yield from self.keep(drive(pipelines), lambda: chain.from_iterable(each.requests for each in pipelines))

    def close(self) -> None:
        """Free the communicator, unless messages of a coroutine that was given up may still arrive on it."""
        if self._comm is not None and not self._broken:
            self._comm.Free()
        self._comm = None

    def keep(
        self, coroutine: Coroutine[T], requests: Callable[[], Iterable[Any]], tensors: Sequence[torch.Tensor] = ()
    ) -> Coroutine[T]:
        """Run `coroutine`; if it is given up or fails, keep its requests and their memory for ever."""
        ended = False
        try:
            result = yield from coroutine
            ended = True
        finally:
            if not ended:
                keep_forever(ABANDONED_REQUEST, *requests(), *tensors)
                self._broken = True
        return result


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
        order = [(first, peer) for first in firsts for peer in peers if first < len(views[peer])]
        made = MessagePipeline(order, ALLTOALL_WINDOW, start)
        made.begin()
        return made

    return [pipeline(comm.Irecv, receives, -1), pipeline(comm.Isend, sends, 1)]
