"""Reductions by messages between pairs of ranks, prepared once for tensors of the same lengths.

Swap: every rank sends all it has to every other one, and each reduces all copies. One message each way: for little.

Pairwise: every rank owns one shard, reduces what the others send for it, and sends them the result. Three ranks, shards
A B C owned by ranks 0 1 2, two packets a shard (A1 A2 ...), seen from rank 0:

    send contributions      B1 to 1, C1 to 2, B2 to 1, C2 to 2
    receive contributions   A1 from 2, A1 from 1, A2 from 2, A2 from 1
    send results            A1 to 1, A1 to 2, A2 to 1, A2 to 2             each once all contributions are there
    receive results         C1 from 2, B1 from 1, C2 from 2, B2 from 1     each once the own contribution has left

Every pipeline goes on by itself, in its order, a few messages at a time. The orders agree: the earliest message that
waits, over all ranks, can always move, so the exchange cannot block itself. How many messages leave at once
(progress.py) is one number for contributions and results. A result leaves only where no contribution could.

A packet is one long run of a tensor, sent and received where it lies, or short runs of many, which are packed. The
first packet of a rank to another one has a header: the stamp of the reduction, and whether the rank is active. So ranks
that reduce different things notice, and active ranks are counted, without a message more.

Each element is reduced in the same order everywhere and from run to run: the results are bitwise the same.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Container, Iterable, Sequence, Sized
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.network.cost_model import MeasuredNetwork
from hvlike.backends.network.partition import Message, PacketSizes, Run, combine, message_length, packets_of
from hvlike.backends.network.progress import BandwidthEstimator, BufferPool, MessagePipeline, drive
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine, Wait, complete
from hvlike.transport.memory.dtypes import Array, runs_at

FIRST_BYTES = 60 << 10
"""Of the first packet to a rank, which every rank receives with room for so many: it fits whatever the sender reduces.
MPI sends so much over TCP at once, without asking the receiver first."""

LARGEST_PACKET = 1 << 20
"""Of a long run, where each asks the receiver first: what has come is still in the cache when it is added."""
AHEAD_BYTES = 3 << 20
"""So much of each peer's contributions is received at once. With 16 MiB in all, 97 MiB took a tenth longer on two
hosts: each packet came to memory that had left the cache."""
EARLY_BYTES = 16 << 20
"""What a rank is sent at most without being asked, by all others together: MPI has to keep it for one that is late."""
PACKED_BYTES = 1 << 20  # While one is on its way the next one is packed
SHORT_BYTES = 64 << 10  # Shorter runs are packed: to copy them costs less than a message

BUFFER_BYTES = 16 << 20  # About how much memory the messages in flight take, at any number of ranks

HEADER = struct.Struct("<QQ")  # The stamp of the reduction; whether the rank is active
GIVEN_UP = 0x676976656E207570  # In place of the stamp: the sender has met another one. No memory holds it by chance
CONTRIBUTION_TAG, _RESULT_TAG = 1, 2


def open_header(message: Array, expected: int, peer: int, rank: int) -> int:
    """How many ranks are active, as a first message says. Raises: MismatchError where its stamp is another one."""
    stamp, active = HEADER.unpack_from(message.data)
    if stamp != expected:
        found = f"rank {peer} reduces" if stamp != GIVEN_UP else f"rank {peer} has found that a rank reduces"
        raise MismatchError(
            f"{found} other tensors at this point than rank {rank}: a planned reduction must have the same "
            "tensors, dtypes and factors in the same order on every rank"
        )
    return int(active)


def give_up(comm: Any, byte: Any, told: Container[int]) -> list[Any]:
    """Have those ranks fail as well that would wait for a first message of this one. Returns the requests of MPI."""
    message = [np.frombuffer(HEADER.pack(GIVEN_UP, 0), np.uint8), byte]
    peers = [peer for peer in range(comm.Get_size()) if peer not in told and peer != comm.Get_rank()]
    return [comm.Isend(message, peer, CONTRIBUTION_TAG) for peer in peers]


class Packet:
    """Runs of tensors that travel in one message."""

    def __init__(self, runs: Message, arithmetic: Arithmetic, *, packed: bool, first: bool) -> None:
        self.header = HEADER.size if first else 0  # Bytes of it
        self.nbytes = message_length(runs) * arithmetic.itemsize
        itemsize = arithmetic.itemsize
        self._runs = [(tensor, start * itemsize, (stop - start) * itemsize) for tensor, start, stop in runs]
        self._packed = packed
        self._arithmetic = arithmetic
        self._places: list[Array] = []
        # Of a long run these are set by `locate`: its bytes as they are sent, without a header, and its elements.
        self.message: Array = np.empty(self.header + self.nbytes if packed else 0, np.uint8)
        self.payload = self.message[self.header :]
        self.piece: Piece = arithmetic.over(self.payload) if packed and runs else self.payload
        self._parts = split(self.payload, (range(nbytes) for *_, nbytes in self._runs)) if packed else []

    def locate(self, addresses: Sequence[int]) -> None:
        """The tensors begin at these addresses from now on."""
        places = runs_at(addresses, self._runs)
        if self._packed:
            self._places = places
            return
        self.message = self.payload = places[0]
        self.piece = self._arithmetic.over(self.payload)

    def pack(self) -> None:
        if self._places:
            np.concatenate(self._places, out=self.payload)

    def unpack(self) -> None:
        for place, part in zip(self._places, self._parts, strict=True):
            place[:] = part


class PairReduction:
    """What the reductions of this file share: packets, and the headers of the peers."""

    def __init__(
        self,
        comm: Any,
        byte: Any,
        arithmetic: Arithmetic,
        shards: Sequence[Sequence[Run]],
        stamp: int,
        ranks: Sequence[int],
        constants: MeasuredNetwork,
    ) -> None:
        """comm: of mpi4py, with errors that raise; byte: its datatype of bytes. shards: runs of tensors that travel
        together. stamp: of this reduction, the same on every rank. ranks: the names of the communicator's, for errors.
        constants: of the network, the same on every rank.
        """
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._byte = byte
        self._arithmetic = arithmetic
        self._stamp = stamp
        self._ranks = ranks
        self._sizes = self._packet_sizes(constants.eager_bytes)
        self._early = constants.early_bytes // arithmetic.itemsize  # Shards of more elements ask the receiver
        self._packets = [self._cut(runs) for runs in shards]
        self._addresses: list[int] | None = None
        self._active = 0  # How many ranks are, of those that have been heard of
        self._header = b""
        self._told: set[int] = set()  # The ranks to which the first message is on its way
        self._last: list[Any] = []  # The requests of MPI with which it was given up

    def run(self, addresses: list[int], active: int) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses, in place; returns how many ranks are active.

        Raises: MismatchError where another rank reduces something else at this point.
        """
        if addresses != self._addresses:
            for packet in chain.from_iterable(self._packets):
                packet.locate(addresses)
            self._addresses = addresses[:]
        self._active = active
        self._header = HEADER.pack(self._stamp, active)
        self._told.clear()
        try:
            yield from self._reduce()
        except MismatchError:
            self._last = give_up(self._comm, self._byte, self._told)
            raise
        return self._active

    def _reduce(self) -> Coroutine[None]:
        """Exchange the packets. One at a time."""
        raise NotImplementedError

    def requests(self) -> Iterable[Any]:
        """Those of MPI that are in flight."""
        raise NotImplementedError

    def _packet_sizes(self, eager_bytes: int) -> PacketSizes:
        nbytes = PacketSizes(
            short=SHORT_BYTES,
            first=FIRST_BYTES - HEADER.size,
            packed=eager_bytes or PACKED_BYTES,
            early=EARLY_BYTES // max(1, self._size - 1),
            eager=eager_bytes or LARGEST_PACKET,
            largest=LARGEST_PACKET,
        )
        return PacketSizes(*(each // self._arithmetic.itemsize for each in nbytes))

    def _cut(self, runs: Sequence[Run]) -> list[Packet]:
        sizes = self._sizes
        if message_length(runs) > self._early:
            sizes = sizes._replace(early=0)
        short, long = packets_of(runs, sizes)
        packets = [
            Packet(each, self._arithmetic, packed=True, first=not number) for number, each in enumerate(short or [[]])
        ]
        return packets + [Packet(each, self._arithmetic, packed=False, first=False) for each in long]

    def _fill(self, packet: Packet) -> Array:
        """The bytes of this rank's contribution."""
        packet.pack()
        if packet.header:
            packet.message[: packet.header] = np.frombuffer(self._header, np.uint8)
        return packet.message

    def _room(self, packet: Packet) -> int:
        """Bytes to receive this packet in."""
        return FIRST_BYTES if packet.header else packet.nbytes

    def _open(self, packet: Packet, peer: int, message: Array) -> Piece:
        """The elements of a contribution that has arrived."""
        if packet.header:
            self._active += open_header(message, self._stamp, self._ranks[peer], self._ranks[self._rank])
        payload = message[packet.header : packet.header + packet.nbytes]
        return self._arithmetic.over(payload) if packet.nbytes else payload


class SwapReduction(PairReduction):
    """Every rank sends all it has to every other one."""

    def __init__(self, *arguments: Any) -> None:
        """arguments: as of PairReduction, with one shard."""
        super().__init__(*arguments)
        (self._all,) = self._packets
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._buffers = [[np.empty(self._room(each), np.uint8) for _ in self._peers] for each in self._all]
        self._requests: list[Any] = []

    def requests(self) -> Iterable[Any]:
        return self._requests + self._last

    def _reduce(self) -> Coroutine[None]:
        comm, byte, peers = self._comm, self._byte, self._peers
        pairs = list(zip(self._all, self._buffers, strict=True))
        receives = [
            [comm.Irecv([buffer, byte], peer, CONTRIBUTION_TAG) for buffer, peer in zip(buffers, peers, strict=True)]
            for _, buffers in pairs
        ]
        sends = []
        requests = self._requests = list(chain.from_iterable(receives))
        for packet in self._all:
            message = [self._fill(packet), byte]
            sends.append([comm.Isend(message, peer, CONTRIBUTION_TAG) for peer in peers])
            self._told.update(peers)
            requests.extend(sends[-1])
        for (packet, buffers), arriving, leaving in zip(pairs, receives, sends, strict=True):
            yield from complete(arriving)
            yield from complete(leaving)
            copies = [self._open(packet, peer, buffer) for peer, buffer in zip(peers, buffers, strict=True)]
            if packet.nbytes:
                copies.insert(self._rank, packet.piece)
                combine(self._arithmetic, copies, packet.piece)
                packet.unpack()
                # It has worked, and was not held up: whoever drives tells that by this.
                yield Wait.AGAIN
        self._requests = []


class PairwiseReduction(PairReduction):
    """Every rank reduces the shard that it owns."""

    def __init__(self, *arguments: Any, buffers: BufferPool, bandwidth: BandwidthEstimator, share: bool = True) -> None:
        """arguments: as of PairReduction, with the shard of each rank. share: send the results to all; without it they
        stay with their owners.
        """
        super().__init__(*arguments)
        self._own = own = self._packets[self._rank]
        self._buffers = buffers
        self._bandwidth = bandwidth
        self._share = share
        self._limit = sys.maxsize  # Messages of any kind on their way from here at once
        self._leaving = 0
        self._contributed = [0] * self._size  # Packets of each rank's shard for which the own contribution has left
        self._pieces: dict[int, Piece] = {}  # Contributions to the packet of the own shard that is next, by rank
        self._taken: list[Array] = []  # Their buffers
        self._finished = 0  # Packets of the own shard that hold the result
        self._slots: deque[Array] = deque()  # Taken for contributions in flight, in their order
        self._largest = max(map(self._room, own))
        window = max(4, BUFFER_BYTES // self._largest)
        ahead = min(window, (self._size - 1) * max(1, AHEAD_BYTES // self._largest))
        mine, theirs = [own] * self._size, self._packets
        self._pipelines = [
            MessagePipeline(self._order(mine, -1), ahead, self._receive_contribution, self._fold),
            MessagePipeline(
                self._order(theirs, 1), window, self._send_contribution, self._contribution_left, self._may_leave
            ),
        ]
        if share:
            self._pipelines += [
                MessagePipeline(
                    self._order(mine, 1, results=True), window, self._send_result, self._result_left, self._is_finished
                ),
                MessagePipeline(
                    self._order(theirs, -1, results=True),
                    window,
                    self._receive_result,
                    self._take_result,
                    self._has_contributed,
                ),
            ]

    def requests(self) -> Iterable[Any]:
        return chain(self._last, *(each.requests for each in self._pipelines))

    def _reduce(self) -> Coroutine[None]:
        self._buffers.require(self._largest)
        self._limit = 1 if self._bandwidth.slow else sys.maxsize
        self._leaving = self._finished = 0
        self._contributed = [0] * self._size
        self._bandwidth.begin()
        for each in self._pipelines:
            each.begin()
        yield from drive(self._pipelines)
        self._bandwidth.end()

    def _order(
        self, packets: Sequence[Sequence[Packet]], shift: int, *, results: bool = False
    ) -> list[tuple[int, int]]:
        """All (packet number, peer) of a pipeline; packets: with each rank; step s: with rank + shift * s."""
        peers = [(self._rank + shift * step) % self._size for step in range(1, self._size)]
        return [
            (number, peer)
            for number in range(max(map(len, packets)))
            for peer in peers
            if number < len(packets[peer]) and not (results and not packets[peer][number].nbytes)
        ]

    # -- contributions --------------------------------------------------------------------------

    def _may_leave(self, number: int, peer: int) -> bool:
        return self._leaving < self._limit

    def _send_contribution(self, number: int, peer: int) -> Any:
        self._leaving += 1
        self._told.add(peer)
        return self._comm.Isend([self._fill(self._packets[peer][number]), self._byte], peer, CONTRIBUTION_TAG)

    def _contribution_left(self, number: int, peer: int) -> None:
        self._leaving -= 1
        self._contributed[peer] += 1

    def _receive_contribution(self, number: int, peer: int) -> Any:
        buffer = self._buffers.take()
        self._slots.append(buffer)
        return self._comm.Irecv([buffer[: self._room(self._own[number])], self._byte], peer, CONTRIBUTION_TAG)

    def _fold(self, number: int, peer: int) -> None:
        """Keep one contribution to a packet of the own shard; with the last one it is reduced."""
        packet = self._own[number]
        self._bandwidth.arrived(packet.nbytes)
        self._taken.append(self._slots.popleft())
        self._pieces[peer] = self._open(packet, peer, self._taken[-1])
        if len(self._taken) < self._size - 1:
            return
        packet.pack()
        self._pieces[self._rank] = packet.piece
        pieces = [self._pieces.pop(each) for each in range(self._size)]
        if self._rank == 1:
            # Only here it is added: nobody sees that the first two are swapped, which spares a copy.
            pieces[:2] = pieces[1::-1]
        if packet.nbytes:
            combine(self._arithmetic, pieces, packet.piece)
        while self._taken:
            self._buffers.give(self._taken.pop())
        self._finished += 1
        if not self._share:
            packet.unpack()

    # -- results --------------------------------------------------------------------------------

    def _is_finished(self, number: int, peer: int) -> bool:
        return self._finished > number and self._leaving < self._limit

    def _send_result(self, number: int, peer: int) -> Any:
        packet = self._own[number]
        self._leaving += 1
        request = self._comm.Isend([packet.payload, self._byte], peer, _RESULT_TAG)
        if peer == (self._rank - 1) % self._size:
            # The last one: what is on its way is only read.
            packet.unpack()
        return request

    def _result_left(self, number: int, peer: int) -> None:
        self._leaving -= 1

    def _has_contributed(self, number: int, peer: int) -> bool:
        # Until then MPI still reads the own contribution from the place where the result goes.
        return self._contributed[peer] > number

    def _receive_result(self, number: int, peer: int) -> Any:
        return self._comm.Irecv([self._packets[peer][number].payload, self._byte], peer, _RESULT_TAG)

    def _take_result(self, number: int, peer: int) -> None:
        packet = self._packets[peer][number]
        self._bandwidth.arrived(packet.nbytes)
        packet.unpack()


def split(whole: Piece, parts: Iterable[Sized]) -> list[Any]:
    """Cut a piece into pieces of the lengths of `parts`; what is left over is left out."""
    ends = [0, *accumulate(map(len, parts))]
    return [whole[start:end] for start, end in pairwise(ends)]
