"""Point to point: tensors from one member of a group to another one, matched by source and tag (matching.py).

    small    the bytes travel with the message: the send is done at once, the receiver copies them into the tensor
    large    the message says where the bytes are. Once a receive has taken it, the receiver reads them straight into
             its tensor, from the sender's memory on one node, from MPI otherwise, and tells the sender, whose send is
             done then. The sender's tensor is kept until it has been told.

A receive may be longer than what comes: then the rest of it stays as it is. Where it is shorter, both ranks get an
error. Messages for a group that this rank has not made yet are kept until it has.
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hvlike.errors import MismatchError, PeerLeftError, ShutdownError, UsageError
from hvlike.torch_distributed.matching import Matching
from hvlike.torch_distributed.tensor_bytes import TensorBytes, bytes_to_fill, bytes_to_send
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory import process_memory
from hvlike.transport.memory.dtypes import Array
from hvlike.transport.messages.direct_copy import LEAST_BYTES
from hvlike.transport.messages.traffic import Topic

logger = logging.getLogger("hvlike")

INLINE_BYTES = 16 << 10
"""Tensors up to this size travel with the message."""

PIECE_BYTES = 2 << 20
"""What is read from another process at a time: the loop has other things to do, too."""

_KIND = "point to point"


# What a message says first, and what follows; plain numbers, which pickle quickly.
_BYTES, _OFFER, _TAKEN, _WRONG = range(4)
# _BYTES: key, tag, bytes. _OFFER: key, tag, number, Place: a large tensor. _TAKEN: number, error or None: the receiver
# has it, or will not take it. _WRONG: key, error: of bytes whose send was done.


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


class PointToPoint:
    """The transfers of one rank in one group."""

    def __init__(self, fabric: Fabric, key: Hashable, ranks: Sequence[int]) -> None:
        """Local. key: the same on all members, and of no other group that there is now; can be pickled. ranks: of the
        world, by position in the group.
        """
        self.ranks = tuple(ranks)
        self._fabric = fabric
        self._loop = fabric.loop
        self._rank = fabric.world.rank
        self._position = {rank: position for position, rank in enumerate(self.ranks)}
        self._matching: Matching[Array | _Offer, Transfer] = Matching()
        self._not_ready: dict[int, deque[tuple[Transfer, int]]] = {}  # Sends that wait for a GPU, and those behind them
        self._moving: set[Transfer] = set()
        self._lost: dict[int, BaseException] = {}  # By position
        self._late: dict[int, BaseException] = {}  # Of sends that were done: the next call with that position gets it
        self._ended: BaseException | None = None
        self._endpoint = _endpoint_of(fabric)
        self.key = self._endpoint.number(key)
        self._loop.perform(lambda: self._endpoint.enter(self))

    # -- from any thread --------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, position: int, tag: int = 0) -> Transfer:
        """Send a tensor; returns at once. It must not change until the transfer is done. Raises: UsageError."""
        self._check("send", position, tag)
        transfer = Transfer(bytes_to_send(tensor), tag)
        self._loop.perform(lambda: self._send(transfer, position))
        return transfer

    def recv(self, tensor: torch.Tensor, position: int | None, tag: int = 0) -> Transfer:
        """Receive into a tensor, from a position or from any (None); returns at once. Raises: UsageError."""
        self._check("recv", position, tag)
        transfer = Transfer(bytes_to_fill(tensor), tag)
        self._loop.perform(lambda: self._receive(transfer, position))
        return transfer

    def lose(self, errors: Mapping[int, BaseException]) -> None:
        """Some ranks of the world have left: what waits for one of them, or for any, ends with the error. What they
        have sent before can still be received.
        """
        self._loop.perform(lambda: self._lose(errors))

    def close(self, error: BaseException) -> None:
        """End what is pending, and all that is begun later, with this error. Tells those who wait for this rank."""
        self._loop.perform(lambda: self._close(error))

    def _check(self, what: str, position: int | None, tag: int) -> None:
        if tag < 0:
            raise UsageError(f"{what}: the tag must not be negative, got {tag}.")
        if position is None:
            return
        if not 0 <= position < len(self.ranks):
            raise UsageError(f"{what}: the group has ranks 0 to {len(self.ranks) - 1}, got {position}.")
        if self.ranks[position] == self._rank:
            raise UsageError(
                f"{what}: rank {self._rank} named itself. A rank cannot send to itself or receive from itself: copy "
                "the tensor (copy_())."
            )

    # -- sends, in the loop -------------------------------------------------------------------------

    def _send(self, transfer: Transfer, position: int) -> None:
        error = self._error_with(position)
        if error is not None:
            transfer.end(error)
            return
        waiting = self._not_ready.get(position)
        if waiting is None and transfer.memory.is_ready:
            self._start_send(transfer, position)
            return
        if waiting is None:
            self._not_ready[position] = waiting = deque()
            self._loop.begin(self._send_when_ready(waiting, position))
        waiting.append((transfer, position))

    def _send_when_ready(self, waiting: deque[tuple[Transfer, int]], position: int) -> Coroutine[None]:
        yield Wait.AGAIN
        while waiting:
            while not waiting[0][0].memory.is_ready:
                yield Wait.POLL
            transfer, _ = waiting.popleft()
            if not transfer.done:
                self._start_send(transfer, position)
        del self._not_ready[position]

    def _start_send(self, transfer: Transfer, position: int) -> None:
        rank, memory = self.ranks[position], transfer.memory
        if memory.nbytes > INLINE_BYTES:
            self._endpoint.offer(self, transfer, rank)
            return
        self._endpoint.send(rank, (_BYTES, self.key, transfer.tag, pickle.PickleBuffer(memory.view.data)))
        transfer.end()

    # -- receives, in the loop ------------------------------------------------------------------------

    def _receive(self, transfer: Transfer, position: int | None) -> None:
        found = self._matching.receive(position, transfer.tag, transfer)
        if found is not None:
            self._take(transfer, *found)
            return
        error = self._error_with(position)
        if error is not None:
            self._matching.take_receives(lambda source: source == position)
            transfer.end(error)

    def hear(self, rank: int, tag: int, message: Array | _Offer) -> None:
        """A message has come, in the loop."""
        source = self._position[rank]
        transfer = self._matching.arrive(source, tag, message)
        if transfer is not None:
            self._take(transfer, source, message)

    def _take(self, transfer: Transfer, source: int, message: Array | _Offer) -> None:
        transfer.source = source
        memory, nbytes = transfer.memory, message.nbytes
        if nbytes > memory.nbytes:
            self._refuse(transfer, source, message)
        elif isinstance(message, _Offer):
            if source in self._lost:
                transfer.end(self._lost[source])
                return
            self._moving.add(transfer)
            self._loop.begin(self._fetch(transfer, message))
        else:
            memory.view[:nbytes] = message
            if memory.is_staged:
                self._moving.add(transfer)
                self._loop.begin(self._deliver(transfer, nbytes))
            else:
                transfer.end()

    def _fetch(self, transfer: Transfer, offer: _Offer) -> Coroutine[None]:
        error: BaseException | None = ShutdownError("hvlike was shut down while this receive was in flight")
        try:
            yield from self._endpoint.read(offer, transfer.memory.view[: offer.nbytes])
            error = None
        except Exception as raised:
            error = raised
        finally:
            # The loop may be closed, and nobody there to tell.
            if not isinstance(error, ShutdownError):
                self._endpoint.answer(offer, error)
            self._moving.discard(transfer)
            if error is not None or not transfer.memory.is_staged:
                transfer.end(error)
        if transfer.memory.is_staged and not transfer.done:
            yield from self._deliver(transfer, offer.nbytes)

    def _deliver(self, transfer: Transfer, nbytes: int) -> Coroutine[None]:
        error: BaseException | None = None
        try:
            yield from transfer.memory.deliver(nbytes)
        except Exception as raised:
            error = raised
        self._moving.discard(transfer)
        transfer.end(error)

    def _refuse(self, transfer: Transfer, source: int, message: Array | _Offer) -> None:
        """The tensor is too small for the message: both ranks are told."""
        rank, tensor = self.ranks[source], transfer.memory.tensor
        error = MismatchError(
            f"rank {self._rank} received from rank {rank} (tag {transfer.tag}, group {self.key!r}) into a tensor of "
            f"{transfer.memory.nbytes} bytes ({tuple(tensor.shape)}, {tensor.dtype}), but rank {rank} sent "
            f"{message.nbytes} bytes. Receive into a tensor that is as large as the one that is sent."
        )
        if isinstance(message, _Offer):
            self._endpoint.refuse(message, error)
        else:
            self._endpoint.send(rank, (_WRONG, self.key, error))
        transfer.end(error)

    # -- errors, in the loop --------------------------------------------------------------------------

    def hear_error(self, rank: int, error: BaseException) -> None:
        """The receiver of bytes whose send is done could not take them: end what waits for it, or the next call."""
        source = self._position[rank]
        logger.error("%s", error)
        waiting = self._matching.take_receives(partial(_may_come_from, source))
        for each in waiting:
            each.end(error)
        if not waiting:
            self._late[source] = error

    def _error_with(self, position: int | None) -> BaseException | None:
        """Why nothing can be sent to a position or be received from there."""
        if self._ended is not None:
            return self._ended
        if position is None:
            return next(iter(self._lost.values()), None)
        return self._lost.get(position) or (self._late.pop(position, None) if self._late else None)

    def _lose(self, errors: Mapping[int, BaseException]) -> None:
        lost = {self._position[rank]: error for rank, error in errors.items() if rank in self._position}
        self._lost.update(lost)
        for position, error in lost.items():
            for each in self._matching.take_receives(partial(_may_come_from, position)):
                each.end(error)
            for transfer, _ in self._not_ready.get(position, ()):
                transfer.end(error)
            self._endpoint.end_sends(self, error, self.ranks[position])
            for each in [each for each in self._moving if each.source == position]:
                each.end(error)

    def _close(self, error: BaseException) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._endpoint.leave(self)
        for each in self._matching.take_receives(lambda source: True):
            each.end(error)
        for waiting in self._not_ready.values():
            for transfer, _ in waiting:
                transfer.end(error)
        for each in tuple(self._moving):
            each.end(error)
        self._endpoint.end_sends(self, error)
        for source, message in self._matching.take_messages():
            if source not in self._lost and isinstance(message, _Offer):
                self._endpoint.refuse(message, self._endpoint.left(self.key))


class _Offer(NamedTuple):
    """A large tensor that another rank sends."""

    rank: int
    number: int
    place: Place

    @property
    def nbytes(self) -> int:
        return self.place.nbytes


class _Sending(NamedTuple):
    """A large tensor that the receiver has not taken yet; its memory must stay."""

    group: PointToPoint
    transfer: Transfer
    rank: int


class _Endpoint:
    """What a rank sends and hears for all of its groups, in the loop."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._channel = fabric.channel
        self._groups: dict[Hashable, PointToPoint] = {}
        self._made: Counter[Hashable] = Counter()
        self._left: set[Hashable] = set()
        self._early: dict[Hashable, list[Callable[[PointToPoint], None]]] = {}
        self._sending: dict[int, _Sending] = {}
        self._number = 0
        self._channel.listen(Topic.POINT_TO_POINT, lambda rank, message, _: self._hear(rank, *message))

    def number(self, key: Hashable) -> Hashable:
        """A key that tells a group from earlier ones of the same key; the same on all members."""
        self._made[key] += 1
        return key if self._made[key] == 1 else (key, self._made[key])

    def enter(self, group: PointToPoint) -> None:
        self._groups[group.key] = group
        for hear in self._early.pop(group.key, ()):
            hear(group)

    def leave(self, group: PointToPoint) -> None:
        self._groups.pop(group.key, None)
        self._left.add(group.key)

    def left(self, key: Hashable) -> ShutdownError:
        return ShutdownError(f"rank {self._fabric.world.rank} has destroyed the group {key!r} and will not receive.")

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._channel.send(rank, Topic.POINT_TO_POINT, message, kind=_KIND)

    def offer(self, group: PointToPoint, transfer: Transfer, rank: int) -> None:
        memory = transfer.memory
        self._number = number = self._number + 1
        self._sending[number] = _Sending(group, transfer, rank)
        direct = self._channel.direct
        if self._fabric.reaches_peers and rank in self._fabric.bells:
            helped = memory.nbytes >= LEAST_BYTES and direct.is_free_for(rank)
            place = Place(memory.nbytes, memory.address, 0, helped)
            if helped:
                direct.take()
                help_to_copy = direct.send(rank, memory.view, _nothing, patience=Wait.NOTIFY)
                self._fabric.loop.begin(help_to_copy)
        else:
            tag, sent = self._channel.send_payload(rank, memory.view)
            place = Place(memory.nbytes, 0, tag, helped=False)
            self._fabric.loop.begin(sent)
        self.send(rank, (_OFFER, group.key, transfer.tag, number, tuple(place)))

    def read(self, offer: _Offer, view: Array) -> Coroutine[None]:
        """Bring the bytes of an offer into `view`, which is as long."""
        place = offer.place
        if place.payload_tag:
            yield from self._channel.receive_payload(offer.rank, place.payload_tag, view)
            return
        if place.helped:
            yield from self._channel.direct.receive(offer.rank, place.address, view, partial(_unreadable, offer))
            return
        process, mine = self._fabric.bells[offer.rank].process, view.ctypes.data
        for start in range(0, place.nbytes, PIECE_BYTES):
            if start:
                yield Wait.AGAIN
            nbytes = min(PIECE_BYTES, place.nbytes - start)
            process_memory.read(process, place.address + start, mine + start, nbytes)

    def answer(self, offer: _Offer, error: BaseException | None) -> None:
        self.send(offer.rank, (_TAKEN, offer.number, error))

    def refuse(self, offer: _Offer, error: BaseException) -> None:
        """Tell the sender that its tensor is not wanted; what comes of it by MPI goes nowhere."""
        if offer.place.helped:
            self._channel.direct.decline(offer.rank)
        self.answer(offer, error)
        if offer.place.payload_tag:
            nowhere = np.empty(offer.nbytes, np.uint8)
            self._fabric.loop.begin(self.read(offer, nowhere))

    def end_sends(self, group: PointToPoint, error: BaseException, rank: int | None = None) -> None:
        """End the sends of a group, to one rank or to all; their memory is kept until its reader has told."""
        for number, each in tuple(self._sending.items()):
            if each.group is group and rank in (None, each.rank):
                each.transfer.end(error)
                if rank is not None:
                    # Lost: it reads no more.
                    del self._sending[number]

    def _hear(self, rank: int, word: int, *rest: Any) -> None:
        if word == _TAKEN:
            number, error = rest
            sending = self._sending.pop(number, None)
            if sending is not None:
                sending.transfer.end(error)
            return
        key, *content = rest
        hear: Callable[[PointToPoint], None]
        if word == _BYTES:
            tag, memory = content
            found = np.frombuffer(memory, np.uint8)
            hear = partial(_hear_message, rank, tag, found)
        elif word == _OFFER:
            tag, number, place = content
            offer = _Offer(rank, number, Place(*place))
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


def _hear_message(rank: int, tag: int, message: Array | _Offer, group: PointToPoint) -> None:
    group.hear(rank, tag, message)


def _hear_error(rank: int, error: BaseException, group: PointToPoint) -> None:
    group.hear_error(rank, error)


def _nothing() -> Coroutine[None]:
    yield from ()


def _unreadable(offer: _Offer) -> Coroutine[None]:
    yield from ()
    raise PeerLeftError(f"The memory of rank {offer.rank}, which has sent {offer.nbytes} bytes, cannot be read.")


def _may_come_from(position: int, wanted: int | None) -> bool:
    return wanted is None or wanted == position


def _endpoint_of(fabric: Fabric) -> _Endpoint:
    endpoint = _endpoints.get(fabric)
    if endpoint is None:
        # One fabric runs at a time: the one before was shut down.
        _endpoints.clear()
        endpoint = _endpoints[fabric] = _Endpoint(fabric)
    return endpoint


_endpoints: dict[Fabric, _Endpoint] = {}
