"""Inline allreduce: when all ranks of a node call at the same time, the calling thread reduces at once.

The tensor, op, factors and a number that ranks can compare are learned when a call is negotiated. Everything that is
not plain is negotiated, with the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import KernelCall, SilentErrstate
from hvlike.backends.inline_allreduce import InlineEngine
from hvlike.backends.shared_memory.board import FINISHED, RING
from hvlike.backends.shared_memory.in_place_shm import AS_SHARED, InlineReduction
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.inline_agreement import BoardAgreement
from hvlike.collectives.controller.inline_calls import (
    DONE,
    INLINE,
    KIND,
    MOST_KNOWN,
    NOT_AT_ALL,
    InlineCalls,
    Outcome,
    code_of,
)
from hvlike.collectives.requests.reduction import Average
from hvlike.collectives.requests.request import RequestSpec
from hvlike.observe.recorder import Recorder
from hvlike.system.system import system
from hvlike.transport.memory.dtypes import bytes_at
from hvlike.transport.memory.own_memory import has_memory

_COMPLEX = (torch.complex64, torch.complex128)


class _BoardPlan(NamedTuple):
    number: int  # The same on all ranks for the same kind
    spec: RequestSpec
    arithmetic: Arithmetic
    copies: list[list[Piece]] | None  # Of small tensors, for each place on the board, in the order of the ranks
    at_once: InlineReduction | None


class _BoardPiece(NamedTuple):
    """A plain tensor in one row, where one was. It keeps no memory: a tensor that is there now does."""

    call: tuple[torch.Size, torch.dtype, int | None, float, float]  # Shape, dtype, op, prescale and postscale
    plan: _BoardPlan
    at_once: InlineReduction | None
    is_complex: bool
    nbytes: int
    memory: memoryview
    slots: tuple[memoryview, ...]  # Where this rank copies it to, for each place on the board, if it is small
    calls: tuple[list[KernelCall], ...]  # What reduces the ranks' copies to it


class InlineAllreduce(InlineCalls[_BoardPlan]):
    def __init__(
        self, controller: Controller, agreement: BoardAgreement, inline: InlineEngine, recorder: Recorder, size: int
    ) -> None:
        """From inside the loop."""
        super().__init__(controller, agreement, recorder, size)
        self._inline = inline
        self._board = inline.board
        self._pieces: dict[int, _BoardPiece] = {}
        self._run = SilentErrstate().run
        agreement.open(inline.board, inline.others)

    # All in one frame: where the caches are cold, as after a backward, a call costs more than most statements.
    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> Outcome:
        try:
            plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
            if not plain or tensor.requires_grad or tensor.is_neg():
                return NOT_AT_ALL
            address = tensor.data_ptr()
            call = (tensor.shape, tensor.dtype, op, prescale, postscale)
        except RuntimeError:
            # It is sparse or nested, or stands for others in a transformation of torch.func.
            return NOT_AT_ALL
        piece = self._pieces.get(address)
        if piece is None or piece.call != call:
            piece = self._piece(tensor, address, op, prescale, postscale)
        if piece is None or (piece.is_complex and tensor.is_conj()):
            return NOT_AT_ALL
        at_once, number, slots = piece.at_once, piece.plan.number, piece.slots
        shared = at_once is not None and at_once.is_shared(address)
        if shared:
            # Faster where it is. Ranks that differ in this do not agree, as where the kinds of their calls differ.
            number, slots = number ^ AS_SHARED, ()
        tensor_queue, board = self._queue, self._board
        begun = offered = False
        interrupt: BaseException | None = None
        try:
            with tensor_queue.lock:
                index = tensor_queue.entered
                if self._busy or self._away or self._recorder.on or index & self._sparing:
                    return NOT_AT_ALL
                if index != board.following and not board.is_free(index):
                    return NOT_AT_ALL
                if (tensor_queue.closed or tensor_queue.requests) and not tensor_queue.may_begin((KIND, name or "")):
                    return NOT_AT_ALL
                begun = self._busy = True
                key, code, place = self._names.get(name) or self._call(name)
                if slots:
                    slots[index % RING][:] = piece.memory
                elif shared and at_once is not None:
                    at_once.post(address)
                tensor_queue.entered = index + 1
                offered, agreed = True, None
                try:
                    agreed = board.offer(index, number, code)
                except BaseException as error:
                    interrupt = error
            if not tensor_queue.here.is_known:
                tensor_queue.know_thread()
            tensor_queue.last = (key, place, system.monotonic())
            if not agreed and not self._wait(index, key[1], interrupt):
                if at_once is not None:
                    at_once.forget()
                return self._refused(index, piece.plan.spec, key[1], tensor)
            self._sparing = 0
            self.served += 1
            self.bytes += piece.nbytes
            if slots:
                run = self._run
                for function, arguments, keywords in piece.calls[index % RING]:
                    run(function, *arguments, **keywords)
            else:
                self._reduce(piece, address, index, key[1], shared=shared)
            if self._interrupt is not None:
                raise self._interrupt
        finally:
            if offered:
                board.mine[FINISHED] = index + 1
            if begun:
                self._busy, self._interrupt = False, None
        return DONE

    def _plan(self, arithmetic: Arithmetic, elements: int, spec: RequestSpec) -> _BoardPlan:
        number = code_of(repr(spec))
        small = self._inline.is_small(elements * arithmetic.itemsize)
        copies = self._inline.copies(arithmetic, elements) if small else None
        return _BoardPlan(number, spec, arithmetic, copies, self._inline.at_once(arithmetic, elements, number))

    def _piece(
        self, tensor: torch.Tensor, address: int, op: int | None, prescale: float, postscale: float
    ) -> _BoardPiece | None:
        """What is known of a plain tensor at an address, from now on; None where its kind is not known."""
        if not has_memory(tensor):
            return None
        shape, dtype = tensor.shape, tensor.dtype
        plan = self._plans.get((shape, dtype, Average if op is None else op, prescale, postscale))
        if plan is None:
            return None
        if len(self._pieces) >= MOST_KNOWN:
            self._pieces.clear()
        nbytes = tensor.numel() * tensor.element_size()
        raw = bytes_at(address, nbytes)
        slots: tuple[memoryview, ...] = ()
        calls: tuple[list[KernelCall], ...] = ()
        if plan.copies is not None:
            slots, elements = self._inline.slots(nbytes), plan.arithmetic.over(raw)
            calls = tuple(plan.arithmetic.calls(copies, elements) for copies in plan.copies)
        call = shape, dtype, op, prescale, postscale
        piece = _BoardPiece(call, plan, plan.at_once, dtype in _COMPLEX, nbytes, raw.data, slots, calls)
        self._pieces[address] = piece
        return piece

    def _wait(self, index: int, name: str, interrupt: BaseException | None) -> bool:
        """Whether all ranks do operation number `index` at once, where that was not plain at first sight.

        interrupt: has come while this rank offered it. It is raised, as one that comes here, once the others need not
        wait for this rank.
        """
        answer = None
        if interrupt is None:
            try:
                answer = self._inline.wait(index)
            except BaseException as error:
                interrupt = error
        if answer is None:
            answer = self._hurry(index, name)
        self._interrupt = interrupt
        return answer

    def _hurry(self, index: int, name: str) -> bool:
        """Tell the others to hurry, and wait for the answer, with reports of who gives none."""
        agreement, look = self._agreement, self._board.look
        agreement.hurry(index)
        self._positions.entered[INLINE] = index
        try:
            self._await(
                lambda: agreement.stopped or look(index) is not None, index, name, lambda error: agreement.stop()
            )
        except BaseException:
            # Nobody knows any more where this rank is.
            agreement.stop()
            raise
        return look(index) or False

    def _reduce(self, piece: _BoardPiece, address: int, index: int, name: str, *, shared: bool) -> None:
        """A tensor that is not small, on the backend; where a peer is slow, wait with reports of who is missing."""
        queue = self._inline.queue
        self._positions.entered[INLINE] = index
        assert piece.at_once is not None
        coroutine = piece.at_once.begin(address, shared=shared)
        operation = queue.run(lambda backend: coroutine, drive=True)
        if not operation.done():
            self._await(operation.done, index, name, queue.fail)
        operation.wait()
