"""Point-to-point messages between ranks: a small header, a pickle, and tensors out of band.

A message is an object (pickled with protocol 5) and any number of contiguous CPU tensors. A small message is one MPI
message:

    header | pickle | tensors | buffers of the pickle | their lengths | their number

The tensors of a larger message follow as MPI messages of at most 16 MiB each and are received straight into their
final storage. Messages of one sender without large tensors arrive in order. Between ranks of one node the longest
tensor may go without MPI (direct_copy.py).

A sender on the same node rings the receiver's doorbell after its MPI send and counts the message in the segment. The
receiver therefore knows how many messages are on their way and never polls for local ones.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvlike.transport.loop.coroutine import Coroutine, Wait, complete
from hvlike.transport.loop.loop import Loop
from hvlike.transport.memory.doorbell import Doorbell
from hvlike.transport.memory.dtypes import raw_view
from hvlike.transport.memory.malloc import allocate_receive_buffer
from hvlike.transport.messages.direct_copy import CopyOffer, DirectCopies
from hvlike.transport.messages.traffic import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray


Handler = Callable[[int, Any, list[torch.Tensor]], None]
"""Called in the loop with the sender's rank, the object and the tensors; must return quickly."""

INLINE_BYTES = 4096
"""Tensors up to this size in all ride in the message itself."""

PIECE_BYTES = 16 << 20
"""Of a payload that is one MPI message: where MPI moves bytes only while it is looked at, each one that has arrived
shows that it pays to go on looking."""

_FIRST_PAYLOAD_TAG = 16
_PAYLOAD_TAGS = 1 << 20
_MESSAGE_TAG = 1
_HEADER = struct.Struct("<IIQ")  # topic and flags, tag of the payload (0: inline), length of the pickle
_HAS_TENSORS, _HAS_BUFFERS = 1, 2
_FLAG_BITS = 2
_COUNT = struct.Struct("<I")  # the end of a message with buffers: how many; before it the length of each


class MessageCounters:
    """How many messages local ranks have sent to each other, in the segment; each word has one writer."""

    def __init__(self, table: memoryview, local: dict[int, int], rank: int) -> None:
        """table: local_size x local_size words, [sender][receiver]; local: rank -> index on the node."""
        self._table = table
        self._local = local
        self._size = len(local)
        self._me = local[rank]
        self._received = 0

    def count_sent(self, rank: int) -> None:
        """One more message has left for the local rank `rank`."""
        self._table[self._me * self._size + self._local[rank]] += 1

    def count_received(self) -> None:
        """One more message from a local rank has been taken."""
        self._received += 1

    def missing(self) -> bool:
        """True while a local rank has sent a message that has not been taken here."""
        return sum(self._table[self._me :: self._size]) > self._received


class Channel:
    """Sends and receives messages over one communicator; used from inside the loop, but for `send_soon`."""

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        loop: Loop,
        bells: dict[int, Doorbell],
        counters: MessageCounters,
        traffic: Traffic,
        direct: DirectCopies,
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._loop = loop
        self._bells = bells
        self._counters = counters
        self._traffic = traffic
        self._direct = direct
        self._remote = len(bells) < comm.size
        self._rank: int = comm.rank
        self._status = mpi.Status()
        self._handlers: dict[int, Handler] = {}
        self._early: dict[int, list[tuple[int, Any, list[torch.Tensor]]]] = {}
        self._sending: list[tuple[list[Any], bytes, Sequence[torch.Tensor]]] = []
        self._incoming: tuple[int, NDArray[np.uint8], Any] | None = None
        self._expecting = False
        self._moving = 0
        self._helping = 0
        self._next_tag = 0
        loop.add_source(self._progress, self._is_half_done)

    def listen(self, topic: int, handler: Handler) -> None:
        """Have messages of `topic` handled by `handler`, those that have come already too; one handler a topic."""

        def begin() -> None:
            self._handlers[topic] = handler
            for message in self._early.pop(topic, []):
                handler(*message)

        self._loop.perform(begin)

    def send_soon(self, rank: int, topic: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """`send` from any thread."""
        self._loop.post(lambda: self.send(rank, topic, value, tensors))

    def send(
        self, rank: int, topic: int, value: Any, tensors: Sequence[torch.Tensor] = (), *, kind: str = "message"
    ) -> None:
        """Start sending; returns at once, keeps `tensors` alive and they must not change until they have left.

        value: what pickle takes; a pickle.PickleBuffer in it is copied once, into the message, and arrives as a
        memoryview, at this rank itself as it is. tensors: contiguous CPU tensors of any dtype in the table, any size.
        kind: under which it is counted.
        """
        if rank == self._rank:
            copies = [tensor.clone() for tensor in tensors]
            self._loop.post(lambda: self._deliver(rank, topic, value, copies))
            return
        views, descriptions = _describe(tensors)
        inline = sum(view.nbytes for view in views) <= INLINE_BYTES
        tag = 0 if inline else self._payload_tag()
        note = None if inline else self._direct.offer(rank, tensors)
        found: list[pickle.PickleBuffer] = []
        content = (value, descriptions, note) if tensors else value
        body = pickle.dumps(content, protocol=5, buffer_callback=found.append)
        if note is not None:
            self._direct.take()
        flags = (_HAS_TENSORS if tensors else 0) | (_HAS_BUFFERS if found else 0)
        header = _HEADER.pack(topic << _FLAG_BITS | flags, tag, len(body))
        parts = (header, body, *(views if inline else ()))
        message = b"".join((*parts, *_trailing(found)) if found else parts)
        self._traffic.control(kind, len(message) + (0 if inline else sum(view.nbytes for view in views)))
        requests = [self._isend(message, rank, _MESSAGE_TAG)]
        if not inline:
            requests += [self._isend(piece, rank, tag) for piece in _pieces(views, note)]
        if rank in self._bells:
            self._counters.count_sent(rank)
            self._bells[rank].ring()
        if not all(request.Test() for request in requests):
            self._sending.append((requests, message, tensors))
        if note is not None:
            self._loop.begin(self._send_directly(rank, views[note[0]], tag))

    @property
    def quiet(self) -> bool:
        """True when nothing is on its way from here."""
        return not (self._sending or self._helping)

    def _is_half_done(self) -> bool:
        """True while something is on its way of which nobody tells when it has arrived."""
        if self._sending:
            self._advance_sends()
        return bool(self._sending or self._moving or self._helping) or self._expecting or self._incoming is not None

    def _isend(self, memory: NDArray[np.uint8] | bytes, rank: int, tag: int) -> Any:
        return self._comm.Isend([memory, self._mpi.BYTE], dest=rank, tag=tag)

    def _irecv(self, memory: NDArray[np.uint8], rank: int, tag: int) -> Any:
        return self._comm.Irecv([memory, self._mpi.BYTE], source=rank, tag=tag)

    def _payload_tag(self) -> int:
        self._next_tag = (self._next_tag + 1) % _PAYLOAD_TAGS
        return _FIRST_PAYLOAD_TAG + self._next_tag

    def _progress(self, rung: bool) -> Wait:
        """The channel's part of a turn of the loop."""
        wait = self._advance_sends() if self._sending else Wait.NOTIFY
        if rung:
            self._expecting = self._counters.missing()
        if self._expecting or self._remote or self._incoming is not None:
            if self._receive():
                self._expecting = self._counters.missing()
                return Wait.AGAIN
            if self._expecting or self._incoming is not None:
                return Wait.POLL
        return wait

    def _advance_sends(self) -> Wait:
        advanced = False
        for entry in list(self._sending):
            requests = entry[0]
            open_before = len(requests)
            requests[:] = [request for request in requests if not request.Test()]
            advanced = advanced or len(requests) < open_before
            if not requests:
                self._sending.remove(entry)
        return Wait.AGAIN if advanced else Wait.POLL

    def _receive(self) -> bool:
        """Take every message that is there; True if there was one.

        Messages of one sender are opened in order: nothing more is taken while one is incomplete.
        """
        received = False
        while self._incoming is not None or self._match():
            incoming = self._incoming
            if incoming is None or not incoming[2].Test():
                return received
            self._incoming = None
            received = True
            self._open(incoming[0], incoming[1])
        return received

    def _match(self) -> bool:
        """Begin to receive the next message, if there is one."""
        status = self._status
        message = self._comm.Improbe(tag=_MESSAGE_TAG, status=status)
        if message is None and self._expecting:
            # The first look has MPI take in what has come and may not see it yet.
            message = self._comm.Improbe(tag=_MESSAGE_TAG, status=status)
        if message is None:
            return False
        source = status.Get_source()
        buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._incoming = (source, buffer, message.Irecv([buffer, self._mpi.BYTE]))
        if source in self._bells:
            self._counters.count_received()
        return True

    def _open(self, source: int, buffer: NDArray[np.uint8]) -> None:
        code, tag, length = _HEADER.unpack_from(buffer.data)
        topic = code >> _FLAG_BITS
        buffers = _trailed(buffer.data) if code & _HAS_BUFFERS else None
        body = pickle.loads(buffer.data[_HEADER.size : _HEADER.size + length], buffers=buffers)
        if not code & _HAS_TENSORS:
            self._deliver(source, topic, body, [])
            return
        value, descriptions, note = body
        tensors = [_make(description) for description in descriptions]
        views = [_bytes_of(tensor) for tensor in tensors]
        if tag:
            self._loop.begin(self._payload(source, topic, value, tensors, views, tag, note))
            return
        start = _HEADER.size + length
        for view in views:
            view[:] = buffer[start : start + view.nbytes]
            start += view.nbytes
        self._deliver(source, topic, value, tensors)

    def _deliver(self, source: int, topic: int, value: Any, tensors: list[torch.Tensor]) -> None:
        handler = self._handlers.get(topic)
        if handler is None:
            self._early.setdefault(topic, []).append((source, value, tensors))
        else:
            handler(source, value, tensors)

    def _payload(
        self,
        source: int,
        topic: int,
        value: Any,
        tensors: list[torch.Tensor],
        views: list[NDArray[np.uint8]],
        tag: int,
        note: CopyOffer | None,
    ) -> Coroutine[None]:
        requests = [self._irecv(piece, source, tag) for piece in _pieces(views, note)]
        self._moving += 1
        try:
            if note is not None:
                yield from self._receive_directly(source, views[note[0]], tag, note)
            for request in requests[:-1]:
                yield from complete([request])
                yield Wait.AGAIN
            yield from complete(requests[-1:])
        finally:
            self._moving -= 1
        self._deliver(source, topic, value, tensors)

    def _send_directly(self, rank: int, view: NDArray[np.uint8], tag: int) -> Coroutine[None]:
        def by_mpi() -> Coroutine[None]:
            return complete([self._isend(piece, rank, tag) for piece in _pieces([view])])

        self._helping += 1
        try:
            yield from self._direct.send(rank, view, by_mpi)
        finally:
            self._helping -= 1

    def _receive_directly(self, source: int, view: NDArray[np.uint8], tag: int, note: CopyOffer) -> Coroutine[None]:
        def by_mpi() -> Coroutine[None]:
            return complete([self._irecv(piece, source, tag) for piece in _pieces([view])])

        yield from self._direct.receive(source, note[1], view, by_mpi)


def _trailing(found: list[pickle.PickleBuffer]) -> list[memoryview | bytes]:
    """The end of a message: these buffers, the length of each, how many there are."""
    memories = [each.raw() for each in found]
    lengths = struct.pack(f"<{len(memories)}Q", *(each.nbytes for each in memories))
    return [*memories, lengths, _COUNT.pack(len(memories))]


def _trailed(message: memoryview) -> list[memoryview]:
    """The buffers in the end of a message."""
    end = len(message) - _COUNT.size
    (count,) = _COUNT.unpack_from(message, end)
    end -= 8 * count
    lengths = struct.unpack_from(f"<{count}Q", message, end)
    start = end - sum(lengths)
    buffers = []
    for length in lengths:
        buffers.append(message[start : start + length])
        start += length
    return buffers


Description = int | tuple[torch.dtype, tuple[int, ...]]
"""What the receiver makes a tensor from: dtype and shape, or the length of one that is nothing but bytes."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for what RPC sends, bytes in a row: quicker to describe and to view than other tensors."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    if _is_plain(tensor):
        plain: NDArray[np.uint8] = tensor.numpy()
        return plain
    return raw_view(tensor).view(np.uint8)


def _describe(tensors: Sequence[torch.Tensor]) -> tuple[list[NDArray[np.uint8]], list[Description]]:
    """Their bytes, and what the receiver makes them from."""
    views: list[NDArray[np.uint8]] = []
    descriptions: list[Description] = []
    for tensor in tensors:
        if _is_plain(tensor):
            views.append(view := tensor.numpy())
            descriptions.append(view.nbytes)
        else:
            views.append(raw_view(tensor).view(np.uint8))
            descriptions.append((tensor.dtype, tuple(tensor.shape)))
    return views, descriptions


def _make(description: Description) -> torch.Tensor:
    if isinstance(description, int):
        return allocate_receive_buffer((description,), torch.uint8)
    dtype, shape = description
    return allocate_receive_buffer(shape, dtype)


def _pieces(views: Sequence[NDArray[np.uint8]], note: CopyOffer | None = None) -> list[NDArray[np.uint8]]:
    """The MPI messages of a payload; note: without the view that goes another way."""
    return [
        view[start : start + PIECE_BYTES]
        for place, view in enumerate(views)
        if note is None or place != note[0]
        for start in range(0, view.nbytes, PIECE_BYTES)
    ]


class Mailbox:
    """Keeps the messages of one topic until a routine asks for them."""

    def __init__(self, channel: Channel, topic: int) -> None:
        self._channel = channel
        self._topic = topic
        self._letters: dict[tuple[int, Hashable], deque[Any]] = {}
        channel.listen(topic, self._deliver)

    def send(self, rank: int, key: Hashable, value: Any) -> None:
        """Send `value` to `rank`, where a routine receives it under `key`. From inside the loop."""
        self._channel.send(rank, self._topic, (key, value), kind="letter")

    def receive(self, rank: int, key: Hashable) -> Coroutine[Any]:
        """Wait for the next value that `rank` sends under `key`."""
        while not (letters := self._letters.get((rank, key))):
            yield Wait.NOTIFY
        value = letters.popleft()
        if not letters:
            del self._letters[(rank, key)]
        return value

    def _deliver(self, rank: int, letter: tuple[Hashable, Any], tensors: list[torch.Tensor]) -> None:
        key, value = letter
        self._letters.setdefault((rank, key), deque()).append(value)
