"""Where messages and bytes go in and out for all groups of a rank: how tensors move from one member to another.

    small    the bytes travel with the message: the send is done at once, the receiver copies them into the tensor
    large    the message says where the bytes are. Once a receive has taken it, the receiver reads them straight into
             its tensor, from the sender's memory on one node, from MPI otherwise, and tells the sender, whose send is
             done then. The sender's tensor is kept until it has been told.

Messages for a group that this rank has not made yet are kept until it has.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvlike.errors import PeerLeftError, ShutdownError
from hvlike.system.system import of_process
from hvlike.torch_distributed.tensor_bytes import TensorBytes
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory import process_memory
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.messages.direct_copy import LEAST_BYTES
from hvlike.transport.messages.traffic import Topic

INLINE_BYTES = 16 << 10
"""Tensors up to this size travel with the message."""

PIECE_BYTES = 2 << 20
"""What is read from another process at a time: the loop has other things to do, too."""

_KIND = "point to point"


# What a message says first, and what follows; plain numbers, which pickle quickly.
_BYTES, _OFFER, _TAKEN, _WRONG = range(4)
# _BYTES: key, tag, bytes. _OFFER: key, tag, number, Place: a large tensor. _WRONG: key, error: of bytes whose send was
# done. _TAKEN: number, error or None: the receiver has it (a sender that helps sees that itself), or will not take it.


class Place(NamedTuple):
    """Where the bytes of a large tensor are: in the sender's memory (address), or in messages of MPI (payload_tag)."""

    nbytes: int
    address: int
    payload_tag: int
    helped: bool  # The sender copies, too (direct_copy.py)


class Transfer:
    """A tensor on its way. It ends once: in the loop, or within the call that has begun it."""

    __slots__ = ("_after", "done", "error", "memory", "source", "tag")

    def __init__(self, memory: TensorBytes, tag: int) -> None:
        self.memory = memory
        self.tag = tag
        self.done = False
        self.error: BaseException | None = None
        self.source = -1  # Of a receive that has its message: the position of the sender in the group
        self._after: deque[Callable[[], None]] = deque()

    def add_done(self, callback: Callable[[], None]) -> None:
        """Call this once the transfer has ended: in the loop, or at once if it has."""
        self._after.append(callback)
        if self.done:
            self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended; a second end changes nothing."""
        if not self.done:
            self.error = error
            self.done = True
            self._tell()

    def _tell(self) -> None:
        # Two threads may be here: each callback is taken by one of them.
        while self._after:
            try:
                callback = self._after.popleft()
            except IndexError:
                return
            callback()


class SendOffer(NamedTuple):
    """A large tensor that another rank sends."""

    rank: int
    number: int
    place: Place

    @property
    def nbytes(self) -> int:
        return self.place.nbytes


class GroupTransfers(Protocol):
    """The transfers of one rank in one group; called in the loop."""

    key: Hashable

    def hear(self, rank: int, tag: int, message: Array | SendOffer) -> None:
        """A message has come from a rank of the world."""

    def hear_error(self, rank: int, error: BaseException) -> None:
        """That rank could not take bytes whose send was done."""


class _Sending(NamedTuple):
    """A large tensor that the receiver has not taken yet; its memory must stay."""

    group: GroupTransfers
    transfer: Transfer
    rank: int
    helped: bool


class Endpoint:
    """What a rank sends and hears for all of its groups, in the loop."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._channel = fabric.channel
        self._groups: dict[Hashable, GroupTransfers] = {}
        self._made: Counter[Hashable] = Counter()
        self._left: set[Hashable] = set()
        self._early: dict[Hashable, list[Callable[[GroupTransfers], None]]] = {}
        self._sending: dict[int, _Sending] = {}
        self._number = 0
        self._channel.listen(Topic.POINT_TO_POINT, lambda rank, message, _: self._hear(rank, *message))

    def number(self, key: Hashable) -> Hashable:
        """A key that tells a group from earlier ones of the same key; the same on all members."""
        self._made[key] += 1
        return key if self._made[key] == 1 else (key, self._made[key])

    def enter(self, group: GroupTransfers) -> None:
        self._groups[group.key] = group
        for hear in self._early.pop(group.key, ()):
            hear(group)

    def leave(self, group: GroupTransfers) -> None:
        self._groups.pop(group.key, None)
        self._left.add(group.key)

    def left(self, key: Hashable) -> ShutdownError:
        return ShutdownError(f"rank {self._fabric.world.rank} has destroyed the group {key!r} and will not receive.")

    def start_send(self, group: GroupTransfers, transfer: Transfer, rank: int) -> None:
        memory = transfer.memory
        if memory.nbytes > INLINE_BYTES:
            self._offer(group, transfer, rank)
            return
        self._send(rank, (_BYTES, group.key, transfer.tag, pickle.PickleBuffer(memory.view.data)))
        transfer.end()

    def send_error(self, group: GroupTransfers, rank: int, error: BaseException) -> None:
        """Tell a rank, whose send is done, that its bytes could not be taken."""
        self._send(rank, (_WRONG, group.key, error))

    def _send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._channel.send(rank, Topic.POINT_TO_POINT, message, kind=_KIND)

    def _offer(self, group: GroupTransfers, transfer: Transfer, rank: int) -> None:
        memory = transfer.memory
        self._number = number = self._number + 1
        direct = self._channel.direct
        if self._fabric.reaches_peers and rank in self._fabric.bells:
            helped = memory.nbytes >= LEAST_BYTES and direct.is_free_for(rank)
            place = Place(memory.nbytes, memory.address, 0, helped)
            if helped:
                direct.take()
                self._fabric.loop.begin(self._help(number, rank, memory.view))
        else:
            tag, sent = self._channel.send_payload(rank, memory.view)
            place = Place(memory.nbytes, 0, tag, helped=False)
            self._fabric.loop.begin(sent)
        self._sending[number] = _Sending(group, transfer, rank, place.helped)
        self._send(rank, (_OFFER, group.key, transfer.tag, number, tuple(place)))

    def _help(self, number: int, rank: int, view: Array) -> Coroutine[None]:
        """Copy from the other end while the receiver copies; it tells by the same slot when it has everything."""
        refused = False

        def refuse() -> Coroutine[None]:
            nonlocal refused
            refused = True
            yield from ()

        yield from self._channel.direct.send(rank, view, refuse, patience=Wait.NOTIFY)
        if not refused:
            self._taken(number, None)
        elif number in self._sending:
            # Its error comes as a message; the slot serves others from here on.
            self._sending[number] = self._sending[number]._replace(helped=False)

    def _taken(self, number: int, error: BaseException | None) -> None:
        """The receiver does not read a tensor of this rank any more."""
        sending = self._sending.pop(number, None)
        if sending is not None:
            sending.transfer.end(error)
            if sending.helped and error is not None:
                self._channel.direct.withdraw()

    def read(self, offer: SendOffer, view: Array) -> Coroutine[None]:
        """Bring the bytes of an offer into `view`, which is as long."""
        place = offer.place
        if place.payload_tag:
            yield from self._channel.receive_payload(offer.rank, place.payload_tag, view)
            return
        if place.helped:
            yield from self._channel.direct.receive(offer.rank, place.address, view, partial(_unreadable, offer))
            return
        process, mine = self._fabric.bells[offer.rank].process, view.ctypes.data
        try:
            for start in range(0, place.nbytes, PIECE_BYTES):
                if start:
                    yield Wait.AGAIN
                nbytes = min(PIECE_BYTES, place.nbytes - start)
                process_memory.read(process, place.address + start, mine + start, nbytes)
        except OSError:
            yield from _unreadable(offer)

    def answer(self, offer: SendOffer, error: BaseException | None) -> None:
        if offer.place.helped and error is None:
            self._fabric.bells[offer.rank].ring()
        else:
            self._send(offer.rank, (_TAKEN, offer.number, error))

    def refuse(self, offer: SendOffer, error: BaseException) -> None:
        """Tell the sender that its tensor is not wanted; what comes of it by MPI goes nowhere."""
        self.answer(offer, error)
        if offer.place.payload_tag:
            nowhere = np.empty(offer.nbytes, np.uint8)
            self._fabric.loop.begin(self.read(offer, nowhere))

    def end_sends(self, group: GroupTransfers, error: BaseException, rank: int | None = None) -> None:
        """End the sends of a group, to one rank or to all; their memory is kept until its reader has told."""
        for number, each in tuple(self._sending.items()):
            if each.group is group and rank in (None, each.rank):
                each.transfer.end(error)
                if rank is not None:
                    # Lost: it reads no more.
                    self._taken(number, error)

    def _hear(self, rank: int, word: int, *rest: Any) -> None:
        if word == _TAKEN:
            self._taken(*rest)
            return
        key, *content = rest
        hear: Callable[[GroupTransfers], None]
        if word == _BYTES:
            tag, memory = content
            found = np.frombuffer(memory, np.uint8)
            hear = partial(_hear_message, rank, tag, found)
        elif word == _OFFER:
            tag, number, place = content
            offer = SendOffer(rank, number, Place(*place))
            if key in self._left:
                self.refuse(offer, self.left(key))
                return
            hear = partial(_hear_message, rank, tag, offer)
        else:
            (error,) = content
            hear = partial(_hear_error, rank, error)
        group = self._groups.get(key)
        if group is not None:
            hear(group)
        elif key not in self._left:
            self._early.setdefault(key, []).append(hear)


def _hear_message(rank: int, tag: int, message: Array | SendOffer, group: GroupTransfers) -> None:
    group.hear(rank, tag, message)


def _hear_error(rank: int, error: BaseException, group: GroupTransfers) -> None:
    group.hear_error(rank, error)


def _unreadable(offer: SendOffer) -> Coroutine[None]:
    yield from ()
    raise PeerLeftError(f"The memory of rank {offer.rank}, which has sent {offer.nbytes} bytes, cannot be read.")


def endpoint_of(fabric: Fabric) -> Endpoint:
    known = _endpoints.known
    endpoint = known.get(fabric)
    if endpoint is None:
        # One fabric runs at a time: the one before was shut down.
        known.clear()
        endpoint = known[fabric] = Endpoint(fabric)
    return endpoint


class _Endpoints:
    def __init__(self) -> None:
        self.known: dict[Fabric, Endpoint] = {}


_endpoints = of_process(_Endpoints)
