"""Inline allreduce across nodes: when all ranks of a set, each on a node of its own, call at the same time.

The ranks agree by one message from each to each (inline_agreement.py). Two ranks send small tensors with it, and both
reduce. Other tensors take an op queue of their own once that is agreed: its reduction is that of negotiated calls, so
the bits of a result do not depend on which way a call took.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.network.offers import Offers
from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.inline_agreement import Agreement, Offer
from hvlike.collectives.controller.inline_calls import KIND, MOST_KNOWN, STEPS, InlineCalls
from hvlike.collectives.health.wait_for_graph import STEP
from hvlike.collectives.requests.reduction import Average
from hvlike.collectives.requests.request import find_call_site
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine, Task
from hvlike.transport.loop.spin import UNSHARED_SECONDS
from hvlike.transport.memory.dtypes import Array, bytes_at
from hvlike.transport.world import Group

MOST_MEMBERS = 8  # Each sends a message to each: with more, two messages through the coordinator are sooner there
SENT_BYTES = 64 << 10  # Tensors up to this size travel with the offer
HURRY_SECONDS = 0.05
"""How long a rank waits for the others' offers. Then they are negotiated, which finds deadlocks and stalls."""


class _Plan(NamedTuple):
    number: int  # The same on all ranks for the same kind
    arithmetic: Arithmetic
    nbytes: int
    is_sent: bool


class InlineMessages(InlineCalls[_Plan]):
    def __init__(
        self, controller: Controller, agreement: Agreement, queue: OpQueue, comm: Any, fabric: Fabric, group: Group
    ) -> None:
        """From inside the loop. queue, comm: nothing else uses them."""
        super().__init__(controller, fabric.recorder, group.size)
        self._agreement = agreement
        self._op_queue = queue
        self._loop = fabric.loop
        self._is_first = group.rank == 0
        peers = {position: rank for position, rank in enumerate(group.ranks) if position != group.rank}
        most = SENT_BYTES if group.size == 2 else 0
        self._offers = Offers(comm, fabric.world.mpi.BYTE, peers, most, fabric.traffic, self._hear)
        self._pieces: dict[tuple[int, int], tuple[Array, Piece]] = {}  # By address and kind
        self._begun = False  # Whether the offer was sent
        self._wanted = -1  # The operation whose offer is to be sent
        fabric.loop.add_source(self._offers.progress, self._offers.is_unfinished)

    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> str | Literal[True] | None:
        try:
            plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
            if not plain or tensor.requires_grad or tensor.is_neg() or tensor.is_conj() or tensor.is_inference():
                return None
            address = tensor.data_ptr()
        except RuntimeError:
            # It is sparse, or stands for others in a transformation of torch.func.
            return None
        plan = self._plans.get((tensor.shape, tensor.dtype, Average if op is None else op, prescale, postscale))
        if plan is None:
            return None
        tensor_queue, agreement = self._queue, self._agreement
        with tensor_queue.lock:
            index = tensor_queue.entered
            if self._busy or self._away or self._recorder.on or index & self._sparing or self._offers.leaving:
                return None
            if not (tensor_queue.may_begin((KIND, name or "")) and agreement.may_offer(index)):
                return None
            self._busy, self._begun, self._wanted = True, False, index
            tensor_queue.entered = index + 1
            key, code, place = self._names.get(name) or self._call(name)
            self._controller.steps[STEPS] = index
            agreement.offer(index, Offer(plan.number, code))
        try:
            tensor_queue.know_thread()
            tensor_queue.last = (key, place, time.monotonic())
            raw, own = self._pieces.get((address, plan.number)) or self._piece(address, plan)
            if not self._agree(index, (index, plan.number, code, 0), raw if plan.is_sent else None, key[1]):
                self._refused(index)
                return key[1]
            self._sparing = 0
            self.served += 1
            self.bytes += plan.nbytes
            if plan.is_sent:
                (theirs,) = agreement.offers.values()
                assert theirs is not None
                assert theirs.data is not None
                self._combine(plan.arithmetic, own, theirs.data)
            else:
                self._reduce(plan.arithmetic, tensor, index, key[1])
        finally:
            if agreement.answer is None:
                self._wanted = -1
                agreement.abandon(sent=self._begun)
            self._busy = False
        return True

    def set_away(self, away: bool) -> None:
        super().set_away(away)
        self._agreement.set_away(away)

    def close(self) -> None:
        self._loop.remove_source(self._offers.progress, self._offers.is_unfinished)
        self._offers.close()

    def _plan(self, arithmetic: Arithmetic, elements: int, number: int) -> _Plan:
        nbytes = elements * arithmetic.itemsize
        return _Plan(number, arithmetic, nbytes, self._size == 2 and nbytes <= SENT_BYTES)

    def _forget(self) -> None:
        super()._forget()
        self._pieces.clear()

    def _piece(self, address: int, plan: _Plan) -> tuple[Array, Piece]:
        """The bytes and elements of a tensor at an address; they keep no memory: a tensor that is there now does."""
        if len(self._pieces) >= MOST_KNOWN:
            self._pieces.clear()
        raw = bytes_at(address, plan.nbytes)
        piece = self._pieces[address, plan.number] = raw, plan.arithmetic.over(raw)
        return piece

    def _hear(self, rank: int, words: tuple[int, ...], data: Array | None) -> None:
        index, kind, code, _ = words
        self._agreement.take(rank, index, Offer(kind, code, data))

    def _agree(self, index: int, words: tuple[int, int, int, int], data: Array | None, name: str) -> bool | None:
        """Send the offer and wait for the answer."""
        controller, agreement, offers, loop = self._controller, self._agreement, self._offers, self._loop

        def begin() -> None:
            if self._wanted != index:
                # The caller was interrupted.
                return
            offers.send(words, data)
            self._begun = True

        def steps() -> Coroutine[None]:
            begin()
            while agreement.answer is None or not offers.sent():
                yield offers.progress()

        if loop.advance(steps(), UNSHARED_SECONDS):
            return agreement.answer
        if not self._begun:
            loop.post(begin, wake=False)

        def done() -> bool:
            return self._begun and agreement.answer is not None and not offers.leaving

        if not loop.wait(done, HURRY_SECONDS):
            agreement.hurry()
            key = (STEP, STEPS)
            controller.enter_step(key, index, find_call_site(), name, lambda error: agreement.stop())
            try:
                controller.wait(key, done, None)
            finally:
                controller.leave_step(key)
        return agreement.answer

    def _combine(self, arithmetic: Arithmetic, own: Piece, received: Array) -> None:
        theirs = arithmetic.over(received)
        if self._is_first:
            arithmetic.combine(own, [theirs])
        else:
            # The order of the other rank: a NaN keeps the same bits on both.
            arithmetic.combine(theirs, [own], [own])

    def _reduce(self, arithmetic: Arithmetic, tensor: torch.Tensor, index: int, name: str) -> None:
        queue, ended = self._op_queue, list[Task[None]]()
        if not queue.drive(queue.backend.allreduce([tensor.view(-1)], arithmetic), ended.append):
            self._await(ended, index, name, queue.fail)
