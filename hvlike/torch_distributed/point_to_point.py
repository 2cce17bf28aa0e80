"""Point to point: tensors from one member of a group to another one, matched by source and tag.

A receive may be longer than what comes: then the rest of it stays as it is. Where it is shorter, both ranks get an
error. How the bytes move: endpoint.py.

    receives  wait, in the order of their calls, for a source or for any
    messages  wait, in the order in which they came

A receive takes the earliest message that fits, a message the earliest receive that fits: never is there one of each
that fit each other. As with MPI, what one rank sends to another by one tag is received in that order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from hvlike.errors import MismatchError, ProcessGroupError, ShutdownError
from hvlike.torch_distributed.endpoint import SendOffer, Transfer, endpoint_of
from hvlike.torch_distributed.tensor_bytes import bytes_to_fill, bytes_to_send
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array

M = TypeVar("M")
R = TypeVar("R")


class Matching(Generic[M, R]):
    """The receives and messages of one rank in one group. Sources are positions in the group."""

    def __init__(self) -> None:
        self._receives: dict[int, list[tuple[int | None, R]]] = {}  # By tag
        self._messages: dict[int, list[tuple[int, M]]] = {}

    def receive(self, source: int | None, tag: int, receive: R) -> tuple[int, M] | None:
        """The message for a new receive, with its source; without one the receive waits. source: None: any."""
        messages = self._messages.get(tag)
        if messages is not None:
            for place, (sender, _) in enumerate(messages):
                if source is None or source == sender:
                    return _take(self._messages, tag, place)
        self._receives.setdefault(tag, []).append((source, receive))
        return None

    def arrive(self, source: int, tag: int, message: M) -> R | None:
        """The receive for a message that has come; without one the message waits."""
        receives = self._receives.get(tag)
        if receives is not None:
            for place, (wanted, _) in enumerate(receives):
                if wanted is None or wanted == source:
                    return _take(self._receives, tag, place)[1]
        self._messages.setdefault(tag, []).append((source, message))
        return None

    def take_receives(self, chosen: Callable[[int | None, R], bool]) -> list[R]:
        """Take the receives that wait and are chosen, by the source they wait for (None: any)."""
        taken = [each for receives in self._receives.values() for source, each in receives if chosen(source, each)]
        left = {tag: [each for each in receives if not chosen(*each)] for tag, receives in self._receives.items()}
        self._receives = {tag: receives for tag, receives in left.items() if receives}
        return taken

    def take_messages(self) -> list[tuple[int, M]]:
        """Take all messages that wait."""
        taken = [each for messages in self._messages.values() for each in messages]
        self._messages.clear()
        return taken


T = TypeVar("T")


def _take(table: dict[int, list[T]], tag: int, place: int) -> T:
    entries = table[tag]
    taken = entries.pop(place)
    if not entries:
        del table[tag]
    return taken


logger = logging.getLogger("hvlike")


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
        self._matching: Matching[Array | SendOffer, Transfer] = Matching()
        self._not_ready: dict[int, deque[tuple[Transfer, int]]] = {}  # Sends that wait for a GPU, and those behind them
        self._moving: set[Transfer] = set()
        self._lost: dict[int, BaseException] = {}  # By position
        self._any_lost: BaseException | None = None  # What a receive from any rank ends with
        self._late: dict[int, BaseException] = {}  # Of sends that were done: the next call with that position gets it
        self._ended: BaseException | None = None
        self._endpoint = endpoint_of(fabric)
        self.key = self._endpoint.number(key)
        self._loop.perform(lambda: self._endpoint.enter(self))

    # -- from any thread --------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, position: int, tag: int = 0) -> Transfer:
        """Send a tensor; returns at once. It must not change until the transfer is done. Raises: ProcessGroupError."""
        self._check("send", position, tag)
        transfer = Transfer(bytes_to_send(tensor), tag)
        self._loop.perform(lambda: self._send(transfer, position))
        return transfer

    def recv(self, tensor: torch.Tensor, position: int | None, tag: int = 0) -> Transfer:
        """Receive into a tensor, from a position or from any (None); returns at once. Raises: ProcessGroupError."""
        self._check("recv", position, tag)
        transfer = Transfer(bytes_to_fill(tensor), tag)
        self._loop.perform(lambda: self._receive(transfer, position))
        return transfer

    def cancel(self, transfer: Transfer, error: BaseException) -> None:
        """End a transfer of this group with an error; a message that comes is left for the next receive."""
        self._loop.perform(lambda: self._cancel(transfer, error))

    def lose(self, errors: Mapping[int, BaseException], in_order: Container[int] = ()) -> None:
        """Some ranks of the world are gone: what waits for one of them ends with the error. What they have sent before
        can still be received. in_order: Ranks that are done. What waits for any rank ends with the first of others that
        is gone, or when all are.
        """
        self._loop.perform(lambda: self._lose(errors, in_order))

    def close(self, error: BaseException) -> None:
        """End what is pending, and all that is begun later, with this error. Tells those who wait for this rank."""
        self._loop.perform(lambda: self._close(error))

    def _check(self, what: str, position: int | None, tag: int) -> None:
        if tag < 0:
            raise ProcessGroupError(f"{what}: the tag must not be negative, got {tag}.")
        if position is None:
            return
        if not 0 <= position < len(self.ranks):
            raise ProcessGroupError(f"{what}: the group has ranks 0 to {len(self.ranks) - 1}, got {position}.")
        if self.ranks[position] == self._rank:
            raise ProcessGroupError(
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
        self._endpoint.start_send(self, transfer, self.ranks[position])

    # -- receives, in the loop ------------------------------------------------------------------------

    def _receive(self, transfer: Transfer, position: int | None) -> None:
        found = self._matching.receive(position, transfer.tag, transfer)
        if found is not None:
            self._take(transfer, *found)
            return
        error = self._error_with(position)
        if error is not None:
            self._matching.take_receives(lambda _, each: each is transfer)
            transfer.end(error)

    def hear(self, rank: int, tag: int, message: Array | SendOffer) -> None:
        """A message has come, in the loop."""
        source = self._position[rank]
        transfer = self._matching.arrive(source, tag, message)
        if transfer is not None:
            self._take(transfer, source, message)

    def _take(self, transfer: Transfer, source: int, message: Array | SendOffer) -> None:
        transfer.source = source
        memory, nbytes = transfer.memory, message.nbytes
        if nbytes > memory.nbytes:
            self._refuse(transfer, source, message)
        elif isinstance(message, SendOffer):
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

    def _fetch(self, transfer: Transfer, offer: SendOffer) -> Coroutine[None]:
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

    def _refuse(self, transfer: Transfer, source: int, message: Array | SendOffer) -> None:
        """The tensor is too small for the message: both ranks are told."""
        rank, tensor = self.ranks[source], transfer.memory.tensor
        error = MismatchError(
            f"rank {self._rank} received from rank {rank} (tag {transfer.tag}, group {self.key!r}) into a tensor of "
            f"{transfer.memory.nbytes} bytes ({tuple(tensor.shape)}, {tensor.dtype}), but rank {rank} sent "
            f"{message.nbytes} bytes. Receive into a tensor that is as large as the one that is sent."
        )
        if isinstance(message, SendOffer):
            self._endpoint.refuse(message, error)
        else:
            self._endpoint.send_error(self, rank, error)
        transfer.end(error)

    # -- errors, in the loop --------------------------------------------------------------------------

    def hear_error(self, rank: int, error: BaseException) -> None:
        """The receiver of bytes whose send is done could not take them: end what waits for it, or the next call."""
        source = self._position[rank]
        logger.error("%s", error)
        waiting = self._matching.take_receives(lambda wanted, _: wanted is None or wanted == source)
        for each in waiting:
            each.end(error)
        if not waiting:
            self._late[source] = error

    def _error_with(self, position: int | None) -> BaseException | None:
        """Why nothing can be sent to a position or be received from there."""
        if self._ended is not None:
            return self._ended
        if position is None:
            return self._any_lost
        return self._lost.get(position) or (self._late.pop(position, None) if self._late else None)

    def _cancel(self, transfer: Transfer, error: BaseException) -> None:
        self._matching.take_receives(lambda _, each: each is transfer)
        transfer.end(error)

    def _lose(self, errors: Mapping[int, BaseException], in_order: Container[int]) -> None:
        lost = {self._position[rank]: error for rank, error in errors.items() if rank in self._position}
        self._lost.update(lost)
        missing = [error for position, error in lost.items() if self.ranks[position] not in in_order]
        if len({*self._lost, self._position[self._rank]}) == len(self.ranks):
            missing += self._lost.values()
        self._any_lost = self._any_lost or next(iter(missing), None)
        if self._any_lost is not None:
            for each in self._matching.take_receives(lambda source, _: source is None):
                each.end(self._any_lost)
        for position, error in lost.items():
            for each in self._matching.take_receives(partial(_comes_from, position)):
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
        for each in self._matching.take_receives(lambda source, each: True):
            each.end(error)
        for waiting in self._not_ready.values():
            for transfer, _ in waiting:
                transfer.end(error)
        for each in tuple(self._moving):
            each.end(error)
        self._endpoint.end_sends(self, error)
        for source, message in self._matching.take_messages():
            if source not in self._lost and isinstance(message, SendOffer):
                self._endpoint.refuse(message, self._endpoint.left(self.key))


def _comes_from(position: int, source: int | None, receive: Transfer) -> bool:
    return source == position
