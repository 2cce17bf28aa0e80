"""Inline allreduce across nodes: when all ranks of a set, each on a node of its own, call at the same time.

The ranks agree by one message from each to each (inline_agreement.py). Where they are two, data go with it:

    small      the tensor is in the offer, and both reduce it
    middling   half of it follows the offer; each reduces its own half, and sends the result
    large      takes an op queue of its own once that is agreed, as all tensors of more ranks do

The sums are those of negotiated calls, so the bits of a result do not depend on which way a call took.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import SilentErrstate
from hvlike.backends.network.offers import Data, Offers
from hvlike.backends.network.progress import has_ended
from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.inline_agreement import MessageAgreement, Offer
from hvlike.collectives.controller.inline_calls import (
    DONE,
    INLINE,
    KIND,
    MOST_KNOWN,
    NOT_AT_ALL,
    InlineCalls,
    Name,
    Outcome,
    code_of,
)
from hvlike.collectives.requests.reduction import Average
from hvlike.collectives.requests.request import RequestSpec
from hvlike.errors import HorovodInternalError
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.memory.dtypes import Array, bytes_at
from hvlike.transport.world import Group

MOST_MEMBERS = 8  # Each sends a message to each: with more, two messages through the coordinator are sooner there
SMALL_BYTES = 64 << 10
HALVED_BYTES = 4 << 20  # Larger ones travel in packets: 8 MiB in halves took a fifth longer
HURRY_SECONDS = 0.05
"""How long a rank waits for the others' offers. Then they are negotiated, which finds deadlocks and stalls."""


class _MessagePlan(NamedTuple):
    number: int  # The same on all ranks for the same kind
    spec: RequestSpec
    arithmetic: Arithmetic
    nbytes: int
    is_small: bool
    is_halved: bool


class _MessagePiece(NamedTuple):
    """A tensor where it lies. It keeps no memory: a tensor that is there now does."""

    sent: Array | None  # Goes with the offer
    bytes: Array  # What this rank reduces
    elements: Piece


class _Attempt(NamedTuple):
    number: int  # Of the operation
    code: int  # Of the name
    plan: _MessagePlan
    piece: _MessagePiece
    tensor: torch.Tensor


class InlineMessages(InlineCalls[_MessagePlan]):
    def __init__(
        self,
        controller: Controller,
        agreement: MessageAgreement,
        queue: OpQueue,
        comm: Any,
        fabric: Fabric,
        group: Group,
    ) -> None:
        """From inside the loop. queue, comm: nothing else uses them."""
        super().__init__(controller, agreement, fabric.recorder, group.size)
        self._agreement: MessageAgreement = agreement
        self._op_queue = queue
        self._loop = fabric.loop
        self._is_first = group.rank == 0
        peers = {position: rank for position, rank in enumerate(group.ranks) if position != group.rank}
        sizes = (SMALL_BYTES, HALVED_BYTES // 2) if group.size == 2 else (0, 0)
        self._offers = Offers(comm, fabric.world.mpi.BYTE, peers, sizes, fabric.traffic, agreement.take)
        self._pieces: dict[tuple[int, int], _MessagePiece] = {}  # By address and kind
        self._run = SilentErrstate().run
        self._begun = False  # Whether the offer was sent
        self._wanted = -1  # The operation whose offer is to be sent
        fabric.loop.add_source(self._offers.progress, self._offers.is_unfinished)

    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> Outcome:
        plan = self._plan_of(tensor, op, prescale, postscale)
        if plan is None:
            return NOT_AT_ALL
        address = tensor.data_ptr()
        called = self._begin(name, plan) if address else None
        if called is None:
            return NOT_AT_ALL
        key, code, place = called
        index, agreement = self._wanted, self._agreement
        try:
            if not self._queue.here.is_known:
                self._queue.know_thread()
            self._queue.last = (key, place, system.monotonic())
            piece = self._pieces.get((address, plan.number)) or self._piece(address, plan)
            if not self._agree(_Attempt(index, code, plan, piece, tensor), key[1]):
                return self._refused(index, plan.spec, key[1], tensor)
            self._sparing = 0
            self.served += 1
            self.bytes += plan.nbytes
            if plan.is_small:
                self._combine(plan.arithmetic, piece.elements)
            elif not plan.is_halved:
                self._reduce(plan.arithmetic, tensor, index, key[1])
            if self._interrupt is not None:
                raise self._interrupt
        finally:
            self._wanted = -1
            if agreement.answer is None:
                agreement.abandon(sent=self._begun)
            if self._offers.leaving:
                self._offers.keep(tensor)
            self._busy, self._interrupt = False, None
        return DONE

    def _plan_of(self, tensor: torch.Tensor, op: int | None, prescale: float, postscale: float) -> _MessagePlan | None:
        """The plan of calls like this one, if there is one and the tensor is plain."""
        try:
            plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
            if not plain or tensor.requires_grad or tensor.is_neg() or tensor.is_conj() or tensor.is_inference():
                return None
            return self._plans.get((tensor.shape, tensor.dtype, Average if op is None else op, prescale, postscale))
        except RuntimeError:
            # It is sparse or nested, or stands for others in a transformation of torch.func.
            return None

    def _begin(self, name: str | None, plan: _MessagePlan) -> Name | None:
        """Number an operation, and say that it is offered; None where no attempt can be made now."""
        tensor_queue, agreement = self._queue, self._agreement
        with tensor_queue.lock:
            index = tensor_queue.entered
            if self._busy or self._away or self._recorder.on or index & self._sparing or self._offers.leaving:
                return None
            if (tensor_queue.closed or tensor_queue.requests) and not tensor_queue.may_begin((KIND, name or "")):
                return None
            if not agreement.may_offer(index):
                return None
            self._busy, self._begun, self._wanted = True, False, index
            tensor_queue.entered = index + 1
            called = self._names.get(name) or self._call(name)
            self._positions.entered[INLINE] = index
            agreement.offer(index, Offer(plan.number, called.code))
        return called

    def close(self) -> None:
        self._loop.remove_source(self._offers.progress, self._offers.is_unfinished)
        self._offers.close()

    def _plan(self, arithmetic: Arithmetic, elements: int, spec: RequestSpec) -> _MessagePlan:
        nbytes = elements * arithmetic.itemsize
        is_small = self._size == 2 and nbytes <= SMALL_BYTES
        number = code_of(repr(spec))
        return _MessagePlan(
            number, spec, arithmetic, nbytes, is_small, self._size == 2 and SMALL_BYTES < nbytes <= HALVED_BYTES
        )

    def _piece(self, address: int, plan: _MessagePlan) -> _MessagePiece:
        if len(self._pieces) >= MOST_KNOWN:
            self._pieces.clear()
        own = bytes_at(address, plan.nbytes)
        sent = own if plan.is_small else None
        if plan.is_halved:
            itemsize = plan.arithmetic.itemsize
            middle = plan.nbytes // itemsize // 2 * itemsize
            own, sent = (own[:middle], own[middle:]) if self._is_first else (own[middle:], own[:middle])
        piece = self._pieces[address, plan.number] = _MessagePiece(sent, own, plan.arithmetic.over(own))
        return piece

    def _agree(self, attempt: _Attempt, name: str) -> bool:
        """Send the offer and wait for the answer; where it is yes, exchange the halves of a tensor that has them."""
        agreement, loop = self._agreement, self._loop
        coroutine = self._steps(attempt)
        try:
            if loop.advance(coroutine, self._op_queue.spin.network_seconds):
                return agreement.answer is True
        except BaseException as error:
            if agreement.answer and attempt.plan.is_halved:
                raise
            # The others count on this rank: it is raised once they need not wait for it.
            self._interrupt = error
            if not self._begun:
                agreement.abandon(sent=False)
                return False
            coroutine = self._steps(attempt)
        task = loop.start(coroutine, wake=False)

        def stop(error: HorovodInternalError) -> None:
            agreement.stop()
            if agreement.answer:
                loop.cancel(task, error)

        ended = False
        try:
            ended = loop.wait(lambda: task.done, HURRY_SECONDS)
        except BaseException as error:
            self._interrupt = error
        if not ended:
            agreement.hurry(attempt.number)
            self._await(lambda: task.done, attempt.number, name, stop)
        if task.error is not None:
            raise task.error
        return agreement.answer is True

    def _steps(self, attempt: _Attempt) -> Coroutine[None]:
        """Goes on where an interrupt has ended the one before."""
        agreement, offers = self._agreement, self._offers
        index, code, plan, piece, tensor = attempt
        if self._wanted != index:
            # The caller was interrupted.
            return
        if not self._begun:
            offers.send((index, plan.number, code, 0), piece.sent)
            self._begun = True
        while agreement.answer is None:
            yield offers.progress()
            if self._wanted != index:
                return
        if agreement.answer and plan.is_halved:
            yield from self._exchange(plan.arithmetic, piece, tensor)
            return
        # A peer that has left may never take the data of a refused offer.
        while not (offers.sent() or agreement.stopped):
            yield offers.progress()

    def _exchange(self, arithmetic: Arithmetic, piece: _MessagePiece, tensor: torch.Tensor) -> Coroutine[None]:
        """Each rank has sent the half that the other one reduces."""
        offers, peer = self._offers, int(self._is_first)
        data = self._received()
        assert piece.sent is not None
        requests: list[Any] = []
        receiving = sending = True
        try:
            while receiving or sending:
                wait = offers.progress()
                if receiving and not offers.leaving:
                    # MPI does not read the place any more.
                    requests.append(offers.receive_result(peer, piece.sent))
                    receiving = False
                if sending and not data.arriving:
                    arithmetic.combine(piece.elements, [arithmetic.over(data.array)])
                    offers.give(data)
                    requests.append(offers.send_result(peer, piece.bytes))
                    sending, wait = False, Wait.AGAIN
                yield wait
            while requests:
                if has_ended(requests[-1]):
                    requests.pop()
                else:
                    yield Wait.POLL
        finally:
            if requests or receiving or sending:
                offers.keep(tensor, requests)

    def _received(self) -> Data:
        """What the other rank has sent with its offer, once all agree."""
        (offer,) = self._agreement.offers.values()
        assert offer is not None
        assert offer.data is not None
        return offer.data

    def _combine(self, arithmetic: Arithmetic, own: Piece) -> None:
        """Both ranks reduce, in one order: a NaN keeps the same bits on both."""
        theirs = arithmetic.over(self._received().array)
        pieces = (own, theirs) if self._is_first else (theirs, own)
        calls = None if arithmetic.joining is None else arithmetic.joining.calls(pieces, own)
        if calls is None:
            arithmetic.combine(pieces[0], pieces[1:], () if self._is_first else (own,))
            return
        for function, arguments, keywords in calls:
            self._run(function, *arguments, **keywords)

    def _reduce(self, arithmetic: Arithmetic, tensor: torch.Tensor, index: int, name: str) -> None:
        queue, flat = self._op_queue, tensor.view(-1)
        operation = queue.run(lambda backend: backend.allreduce([flat], arithmetic), drive=True)
        if not operation.done():
            self._await(operation.done, index, name, queue.fail)
        operation.wait()
