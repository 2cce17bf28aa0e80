"""Point-to-point messages between ranks: a small header, a pickle, and tensors out of band.

A message is an object (pickled with protocol 5) and any number of contiguous CPU tensors.

    header | pickle | inline tensors | buffers of the pickle | length of each buffer | number of buffers

The header holds topic and flags, the tag of the payload (0: the tensors are inline), and the length of the pickle.
A small message is one MPI message. The tensors of a larger one follow as MPI messages of their own and are received
straight into their final storage. Messages of one sender without large tensors arrive in order. Between ranks of one
node the longest tensor may go without MPI (direct_copy.py).

A sender on the same node rings the receiver's doorbell after its MPI send and counts the message in the segment. The
receiver therefore knows how many messages are on their way and never polls for local ones.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from hvlike.transport.loop.coroutine import Coroutine, Wait, complete
from hvlike.transport.loop.loop import Loop
from hvlike.transport.memory.doorbell import Doorbell
from hvlike.transport.memory.dtypes import Array, raw_view
from hvlike.transport.memory.malloc import allocate_receive_buffer
from hvlike.transport.memory.never_freed import ABANDONED_REQUEST, keep_forever
from hvlike.transport.messages.direct_copy import CopyOffer, DirectCopies
from hvlike.transport.messages.traffic import Traffic

Handler = Callable[[int, Any, list[torch.Tensor]], None]
"""Called in the loop with the sender's rank, the object and the tensors; must return quickly."""

INLINE_BYTES = 4096
"""Tensors up to this size in all are part of the message itself."""

PIECE_BYTES = 16 << 20
"""The longest MPI message of a payload. Where MPI moves bytes only while it is called, each piece that has arrived
shows the receiver that it pays to go on polling."""

HEADER = struct.Struct("<IIQ")
HAS_TENSORS, HAS_BUFFERS = 1, 2
FLAG_BITS = 2
_COUNT = struct.Struct("<I")

Description = int | tuple[torch.dtype, tuple[int, ...]]
"""What the receiver makes a tensor from: dtype and shape, or the length of a tensor of plain bytes."""

_MESSAGE_TAG = 1
_FIRST_PAYLOAD_TAG = 16
_PAYLOAD_TAGS = 1 << 20


@dataclass(eq=False, slots=True)
class _Incoming:
    """A message that is there, but not all of its bytes."""

    source: int
    buffer: Array
    request: Any


class Channel:
    """Sends and receives messages over one communicator; used from inside the loop, but for `send_soon`."""

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        loop: Loop,
        bells: dict[int, Doorbell],
        counters: memoryview,
        traffic: Traffic,
        direct: DirectCopies,
    ) -> None:
        """bells: of the ranks of this node, in their order on it. counters: zeroed words [sender][receiver] of the
        segment: how many messages a local rank has sent to another. Each has one writer.
        """
        self._mpi = mpi
        self._comm = comm
        self._loop = loop
        self._bells = bells
        self._traffic = traffic
        self.direct = direct
        self._remote = len(bells) < comm.size
        self._rank: int = comm.rank
        self._status = mpi.Status()
        size, me = len(bells), list(bells).index(self._rank)
        self._sent = counters[me * size : (me + 1) * size]
        self._place = {rank: place for place, rank in enumerate(bells)}
        self._counted = counters[me::size]
        self._taken = [0] * size
        self._lost: set[int] = set()
        self._handlers = _Handlers()
        self._sending: list[tuple[list[Any], bytes, Sequence[torch.Tensor]]] = []
        self._incoming: list[_Incoming] = []
        self._expecting = False
        self._unfinished = 0
        self._copying = 0
        self._next_tag = 0
        loop.add_source(self._progress, self._is_unfinished)

    def listen(self, topic: int, handler: Handler) -> None:
        """Have messages of `topic` handled by `handler`, those that have come already too; one handler a topic."""

        self._loop.perform(lambda: self._handlers.register(topic, handler))

    def send_soon(self, rank: int, topic: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._loop.post(lambda: self.send(rank, topic, value, tensors))

    def send(
        self, rank: int, topic: int, value: Any, tensors: Sequence[torch.Tensor] = (), *, kind: str = "message"
    ) -> None:
        """Start sending; returns at once, keeps `tensors` (contiguous, on the CPU) alive; they must not change until
        they left. A pickle.PickleBuffer in `value` is copied once, into the message, and arrives as a memoryview, at
        this rank itself as it is. kind: under which the message is counted.
        """
        if rank == self._rank:
            copies = [tensor.clone() for tensor in tensors]
            self._loop.post(lambda: self._handlers[topic](rank, value, copies))
            return
        flags, tag, payload_bytes = 0, 0, 0
        views: list[Array] = []
        offer: CopyOffer | None = None
        content = value
        if tensors:
            views, descriptions = describe_tensors(tensors)
            flags, payload_bytes = HAS_TENSORS, sum(view.nbytes for view in views)
            if payload_bytes > INLINE_BYTES:
                tag = self._new_tag()
                offer = self.direct.offer(rank, tensors)
            content = (value, descriptions, offer)
        found: list[pickle.PickleBuffer] = []
        body = pickle.dumps(content, protocol=5, buffer_callback=found.append)
        if offer is not None:
            self.direct.take()
        if found:
            flags |= HAS_BUFFERS
        header = HEADER.pack(topic << FLAG_BITS | flags, tag, len(body))
        message = b"".join((header, body, *(() if tag else views), *(pack_buffers(found) if found else ())))
        self._traffic.control[kind] += 1
        self._traffic.control_bytes += len(message) + (payload_bytes if tag else 0)
        requests = [self._comm.Isend([message, self._mpi.BYTE], rank, _MESSAGE_TAG)]
        if tag:
            requests += self._start_sends(rank, tag, pieces_of(views, offer))
            requests.reverse()
        if rank in self._place:
            self._sent[self._place[rank]] += 1
            self._bells[rank].ring()
        while requests and requests[-1].Test():
            requests.pop()
        if requests:
            self._sending.append((requests, message, tensors))
        if offer is not None:
            self._loop.begin(self._copy_to(rank, views[offer[0]], tag))

    def send_payload(self, rank: int, view: Array) -> tuple[int, Coroutine[None]]:
        """Start sending memory to another rank, which receives it where it likes by the tag that is returned, together
        with what ends when the memory is free again. `rank` has to be told the tag.
        """
        tag = self._new_tag()
        self._traffic.data_messages += 1
        self._traffic.data_bytes += view.nbytes
        return tag, self._finish(self._start_sends(rank, tag, pieces_of([view])))

    def receive_payload(self, rank: int, tag: int, view: Array) -> Coroutine[None]:
        """Receive into `view` what `rank` sends by this tag; as long as that."""
        return self._finish(self._start_receives(rank, tag, pieces_of([view])))

    @property
    def quiet(self) -> bool:
        """Whether all that was sent has left, and all that the ranks of this node have sent has been taken."""
        return not (self._sending or self._copying) and sum(self._counted) <= sum(self._taken)

    def lose(self, rank: int) -> None:
        """Wait no longer for what a lost rank has begun to send. In the loop."""
        self._lost.add(rank)
        # It may have sent a message that it could not count any more, or the other way round.
        if (place := self._place.pop(rank, None)) is not None:
            self._taken[place] = self._counted[place]

    def _is_unfinished(self) -> bool:
        """True while something is on its way whose arrival no doorbell announces."""
        if self._sending:
            self._advance_sends()
        return bool(self._sending or self._unfinished or self._copying) or self._expecting or bool(self._incoming)

    def _progress(self, rung: bool) -> Wait:
        wait = self._advance_sends() if self._sending else Wait.NOTIFY
        if rung:
            self._expecting = sum(self._counted) > sum(self._taken)
        if self._expecting or self._remote or self._incoming:
            if self._receive():
                self._expecting = sum(self._counted) > sum(self._taken)
                return Wait.AGAIN
            if self._expecting or self._incoming:
                return Wait.POLL
        return wait

    def _advance_sends(self) -> Wait:
        wait = Wait.POLL
        for entry in tuple(self._sending):
            # The requests of a message stand in reverse order: the first of them ends first.
            requests = entry[0]
            while requests and requests[-1].Test():
                requests.pop()
                wait = Wait.AGAIN
            if not requests:
                self._sending.remove(entry)
        return wait

    def _receive(self) -> bool:
        """Take the messages that are there, those of each rank in their order; True if one was whole."""
        received = self._complete_incoming() if self._incoming else False
        status, byte = self._status, self._mpi.BYTE
        while True:
            message = self._comm.Improbe(tag=_MESSAGE_TAG, status=status)
            if message is None and self._expecting:
                # The first call has MPI take in what has come and may not see it yet.
                message = self._comm.Improbe(tag=_MESSAGE_TAG, status=status)
            if message is None:
                return received
            source = status.Get_source()
            buffer = np.empty(status.Get_count(byte), np.uint8)
            request = message.Irecv([buffer, byte])
            if (place := self._place.get(source)) is not None:
                self._taken[place] += 1
            # A rank that stops, or whose link is cut, in the middle of a message holds up no other.
            if any(each.source == source for each in self._incoming) or not request.Test():
                self._incoming.append(_Incoming(source, buffer, request))
                continue
            received = True
            self._open(source, buffer)

    def _complete_incoming(self) -> bool:
        """Open the messages whose last bytes have come since; True if there was one."""
        received, waiting = False, set[int]()
        for entry in tuple(self._incoming):
            if entry.source in waiting:
                continue
            if entry.request.Test():
                self._incoming.remove(entry)
                received = True
                self._open(entry.source, entry.buffer)
            elif entry.source in self._lost:
                # The rest of it will not come.
                self._incoming.remove(entry)
                keep_forever(ABANDONED_REQUEST, entry)
            else:
                waiting.add(entry.source)
        return received

    def _open(self, source: int, buffer: Array) -> None:
        memory = buffer.data
        code, tag, length = HEADER.unpack_from(memory)
        topic, end = code >> FLAG_BITS, HEADER.size + length
        buffers = unpack_buffers(memory) if code & HAS_BUFFERS else None
        body = pickle.loads(memory[HEADER.size : end], buffers=buffers)
        if not code & HAS_TENSORS:
            self._handlers[topic](source, body, [])
            return
        value, descriptions, offer = body
        tensors = [make_tensor(description) for description in descriptions]
        views = [bytes_of(tensor) for tensor in tensors]
        if tag:
            self._loop.begin(self._receive_payload(source, topic, value, tensors, views, tag, offer))
            return
        for view in views:
            view[:] = buffer[end : end + view.nbytes]
            end += view.nbytes
        self._handlers[topic](source, value, tensors)

    def _receive_payload(
        self,
        source: int,
        topic: int,
        value: Any,
        tensors: list[torch.Tensor],
        views: list[Array],
        tag: int,
        offer: CopyOffer | None,
    ) -> Coroutine[None]:
        requests = self._start_receives(source, tag, pieces_of(views, offer))
        self._unfinished += 1
        try:
            if offer is not None:
                view = views[offer[0]]
                again = partial(self.receive_payload, source, tag, view)
                yield from self.direct.receive(source, offer[1], view, again)
        finally:
            self._unfinished -= 1
        yield from self._finish(requests)
        self._handlers[topic](source, value, tensors)

    def _copy_to(self, rank: int, view: Array, tag: int) -> Coroutine[None]:
        """The sender's part of a direct copy; by MPI where the receiver asks for that."""

        def by_mpi() -> Coroutine[None]:
            return complete(self._start_sends(rank, tag, pieces_of([view])))

        self._copying += 1
        try:
            yield from self.direct.send(rank, view, by_mpi)
        finally:
            self._copying -= 1

    def _new_tag(self) -> int:
        self._next_tag = (self._next_tag + 1) % _PAYLOAD_TAGS
        return _FIRST_PAYLOAD_TAG + self._next_tag

    def _start_sends(self, rank: int, tag: int, pieces: Sequence[Array]) -> list[Any]:
        return [self._comm.Isend([piece, self._mpi.BYTE], rank, tag) for piece in pieces]

    def _start_receives(self, rank: int, tag: int, pieces: Sequence[Array]) -> list[Any]:
        return [self._comm.Irecv([piece, self._mpi.BYTE], rank, tag) for piece in pieces]

    def _finish(self, requests: Sequence[Any]) -> Coroutine[None]:
        """Wait for the pieces of a payload, which end in order: each shows that it pays to go on polling."""
        self._unfinished += 1
        ended = False
        try:
            for request in requests[:-1]:
                yield from complete([request])
                yield Wait.AGAIN
            yield from complete(requests[-1:])
            ended = True
        finally:
            self._unfinished -= 1
            if not ended:
                keep_forever(ABANDONED_REQUEST, *requests)


class _Handlers(dict[int, Handler]):
    """The handlers by topic. Messages of a topic without a handler are kept until there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._early: dict[int, list[tuple[int, Any, list[torch.Tensor]]]] = {}

    def __missing__(self, topic: int) -> Handler:
        return lambda *message: self._early.setdefault(topic, []).append(message)

    def register(self, topic: int, handler: Handler) -> None:
        self[topic] = handler
        for message in self._early.pop(topic, []):
            handler(*message)


class Mailbox:
    """Keeps the messages of one topic until a coroutine asks for them, by sender and key."""

    def __init__(self, channel: Channel, topic: int) -> None:
        self._channel = channel
        self._topic = topic
        self._values: dict[tuple[int, Hashable], deque[Any]] = {}
        channel.listen(topic, self._deliver)

    def send(self, rank: int, key: Hashable, value: Any) -> None:
        """Send `value` to `rank`, where a coroutine receives it under `key`. From inside the loop."""
        self._channel.send(rank, self._topic, (key, value), kind="mailbox")

    def receive(self, rank: int, key: Hashable) -> Coroutine[Any]:
        while not (values := self._values.get((rank, key))):
            yield Wait.NOTIFY
        value = values.popleft()
        if not values:
            del self._values[(rank, key)]
        return value

    def _deliver(self, rank: int, message: tuple[Hashable, Any], tensors: list[torch.Tensor]) -> None:
        key, value = message
        self._values.setdefault((rank, key), deque()).append(value)


def pack_buffers(found: Sequence[pickle.PickleBuffer]) -> list[memoryview | bytes]:
    """The end of a message: these buffers, the length of each, and their number."""
    memories = [each.raw() for each in found]
    lengths = struct.pack(f"<{len(memories)}Q", *(each.nbytes for each in memories))
    return [*memories, lengths, _COUNT.pack(len(memories))]


def unpack_buffers(message: memoryview) -> list[memoryview]:
    end = len(message) - _COUNT.size
    (count,) = _COUNT.unpack_from(message, end)
    end -= 8 * count
    lengths = struct.unpack_from(f"<{count}Q", message, end)
    ends = accumulate(lengths, initial=end - sum(lengths))
    return [message[start:stop] for start, stop in pairwise(ends)]


def describe_tensors(tensors: Sequence[torch.Tensor]) -> tuple[list[Array], list[Description]]:
    """The bytes of these tensors, and what the receiver makes them from."""
    views: list[Array] = []
    descriptions: list[Description] = []
    for tensor in tensors:
        views.append(view := bytes_of(tensor))
        descriptions.append(view.nbytes if _is_plain(tensor) else (tensor.dtype, tuple(tensor.shape)))
    return views, descriptions


def make_tensor(description: Description) -> torch.Tensor:
    if isinstance(description, int):
        return allocate_receive_buffer((description,), torch.uint8)
    dtype, shape = description
    return allocate_receive_buffer(shape, dtype)


def bytes_of(tensor: torch.Tensor) -> Array:
    if _is_plain(tensor):
        plain: Array = tensor.numpy()
        return plain
    return raw_view(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a row of bytes, which is what RPC sends: quicker to describe and to view than other tensors."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()


def pieces_of(views: Sequence[Array], offer: CopyOffer | None = None) -> list[Array]:
    """The MPI messages of a payload, without the view that is copied directly (`offer`)."""
    return [
        view[start : start + PIECE_BYTES]
        for place, view in enumerate(views)
        if offer is None or place != offer[0]
        for start in range(0, view.nbytes, PIECE_BYTES)
    ]
