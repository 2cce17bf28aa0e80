"""allreduce on the express way: a call that all ranks of a node make now is done in the calling thread, at once.

What it needs to know of a call (its tensor, op and factors, and a number made of them that ranks can compare) it learns
when the call goes the ordinary way, through the coordinator. Whatever is not plain goes there too; the outcome is the
same.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from hvlike.collectives.names import automatic_name
from hvlike.collectives.negotiator import Negotiator
from hvlike.collectives.operand import working_dtype
from hvlike.collectives.places import Place, place_of_caller
from hvlike.collectives.reductions import Average, arithmetic_of
from hvlike.collectives.request import Signature
from hvlike.collectives.waits import STEP
from hvlike.observe.recorder import Recorder
from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.at_once import AtOnce
from hvlike.planes.board import FINISHED, RING
from hvlike.planes.express import Express
from hvlike.planes.kernels import Call
from hvlike.planes.ops import ReduceOp
from hvlike.planes.quiet import Quiet
from hvlike.transport.dtypes import bytes_at
from hvlike.transport.task import Task

MOST_PLANS = 1024
"""Kinds of calls that are remembered; with one more all are learned anew."""

MOST_PIECES = 64
"""Addresses that are remembered for one kind of calls."""

MOST_SPARING = 63
"""After refusals in a row only every 64th call is an attempt: that with a number all ranks attempt at."""

_COMPLEX = (torch.complex64, torch.complex128)
_FRAMES = 2
"""Of the library, where an attempt is made: allreduce_ and attempt."""

_NOBODY = (lambda: None).__code__

_STEPS = "allreduce on the express way"
_NAMED = 1 << 63
_Kind = tuple[torch.Size, torch.dtype, int, float, float]
"""Shape, dtype, op, prescale and postscale."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    done: bool
    name: str
    """Under which it goes on in the ordinary way, where it is not done."""


DONE = Outcome(True, "")


@dataclass(frozen=True, slots=True)
class _Piece:
    """The elements of a plain tensor in one row, where one was. It keeps no memory: a tensor that is there now does."""

    elements: Piece
    calls: tuple[list[Call], ...] = ()
    """What reduces the ranks' copies of a small tensor to it, for each place on the board."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known of calls of one kind."""

    number: int
    is_complex: bool
    arithmetic: Arithmetic
    copies: list[list[Piece]] | None
    """The memory of all ranks' copies, for small tensors: for each place on the board, in the order of the ranks."""
    bytes: int
    at_once: AtOnce | None
    """What reduces large ones."""
    pieces: dict[int, _Piece]
    """By the address of the first element."""

    def piece(self, address: int) -> _Piece:
        """The elements there, without a copy."""
        if len(self.pieces) >= MOST_PIECES:
            self.pieces.clear()
        elements = self.arithmetic.over(bytes_at(address, self.bytes))
        calls = tuple(self.arithmetic.calls(copies, elements) for copies in self.copies or ())
        piece = self.pieces[address] = _Piece(elements, calls)
        return piece


class ExpressAllreduce:
    """The express way of one process set on one node."""

    def __init__(self, negotiator: Negotiator, express: Express, recorder: Recorder, size: int, rank: int) -> None:
        """size: of the set; rank: in it."""
        self._negotiator = negotiator
        self._ledger = ledger = negotiator.ledger
        self._express = express
        self._board = express.board
        self._size = size
        self._rank = rank
        self._plans: dict[_Kind, _Plan] = {}
        self._recorder = recorder
        self._lock = threading.Lock()
        self._away = False
        self._sparing = 0
        self.served = 0
        """Calls that were done here; the same on every rank after any of them."""
        self.bytes = 0
        """Of the tensors of those calls."""
        self._large = 0
        self._quiet = Quiet()
        self._caller = _NOBODY
        """The code that has called last, outside of the library."""
        with ledger.lock:
            ledger.on_entry = express.passed
            express.board.passed(ledger.entered)

    # All in one frame: where the caches are cold, as after a backward, a call costs more than most statements.
    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> Outcome | None:
        """Reduce in place, if all ranks of the set call this now with the like. Blocks for a moment.

        Returns None when nothing was tried; then nothing is known of the call to anybody.
        Raises: HorovodInternalError as the ordinary way does.
        """
        ledger = self._ledger
        plan = self._plans.get((tensor.shape, tensor.dtype, Average if op is None else op, prescale, postscale))
        if plan is None or self._recorder.on or self._away or ledger.entered & self._sparing:
            return None
        try:
            plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
            if not plain or tensor.requires_grad or tensor.is_neg() or (plan.is_complex and tensor.is_conj()):
                return None
            address = tensor.data_ptr()
        except RuntimeError:
            # It is sparse, or stands for others in a transformation of torch.func.
            return None
        if not self._lock.acquire(False):
            return None
        try:
            copies = plan.copies
            if copies is None or (plan.at_once is not None and plan.at_once.is_shared(address)):
                return self._attempt_large(plan, tensor, address, name)
            piece = plan.pieces.get(address) or plan.piece(address)
            frame = sys._getframe(_FRAMES)
            caller = frame.f_code
            known = caller is self._caller
            place: Place = tuple.__new__(Place, (caller, frame.f_lasti)) if known else self._place(caller)
            with ledger.lock:
                index = ledger.entered
                if (ledger.closed or ledger.requests) and not ledger.may_begin(("allreduce", name or "")):
                    return None
                if index != self._board.following and not self._board.is_free(index):
                    return None
                if name is None:
                    code = self._negotiator.names.draw("allreduce")
                    name = automatic_name(code)
                else:
                    code = code_of(name)
                copy: Any = copies[index % RING][self._rank]
                copy[...] = piece.elements
                ledger.entered = index + 1
                agreed = self._board.offer(index, plan.number, code)
            if not getattr(ledger.here, "known", False):
                ledger.know_thread()
            ledger.last = (("allreduce", name), place, time.monotonic())
            try:
                if not agreed and not self._wait(plan, index):
                    return Outcome(False, name)
                self._sparing = 0
                self.served += 1
                self.bytes += plan.bytes
                run = self._quiet.run
                for function, arguments, keywords in piece.calls[index % RING]:
                    run(function, *arguments, **keywords)
            finally:
                self._board.mine[FINISHED] = index + 1
            return DONE
        finally:
            self._lock.release()

    def learn(self, signature: Signature, tensor: torch.Tensor) -> None:
        """A call goes the ordinary way: remember what it is, if its like may take this one."""
        op = ReduceOp(signature.op)
        kind = (tensor.shape, tensor.dtype, op, signature.prescale, signature.postscale)
        if kind in self._plans or signature.device != "cpu" or signature.strides != (None,) or not tensor.numel():
            return
        if op is ReduceOp.ADASUM or working_dtype(tensor.dtype, op) is not tensor.dtype:
            return
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        arithmetic = arithmetic_of(tensor.dtype, op, self._size, signature.prescale, signature.postscale)
        nbytes = tensor.numel() * tensor.element_size()
        copies = self._express.copies(arithmetic, tensor.numel()) if self._express.is_small(nbytes) else None
        number = code_of(repr(signature))
        at_once = self._express.at_once(arithmetic, tensor.numel(), number)
        is_complex = tensor.dtype in _COMPLEX
        self._plans[kind] = _Plan(number, is_complex, arithmetic, copies, nbytes, at_once, {})

    def set_away(self, away: bool) -> None:
        """This rank has joined, or all have. Waits for an attempt of another thread."""
        with self._lock:
            self._away = away
            self._express.board.set_away(away)

    def _attempt_large(self, plan: _Plan, tensor: torch.Tensor, address: int, name: str | None) -> Outcome | None:
        """A tensor that is reduced where it is, on the plane."""
        ledger, board, at_once = self._ledger, self._board, plan.at_once
        with ledger.lock:
            index = ledger.entered
            if not board.is_free(index) or not ledger.may_begin(("allreduce", name or "")):
                return None
            code = self._negotiator.names.draw("allreduce") if name is None else code_of(name)
            name = automatic_name(code) if name is None else name
            ledger.notice(("allreduce", name), place_of_caller(_FRAMES + 1))
            if at_once is not None:
                at_once.foretell(address)
            # Ranks that differ in where it lies hear a no, as the kinds of their calls do.
            kind = plan.number if plan.copies is None else plan.number ^ 1
            ledger.entered = index + 1
            try:
                agreed = board.offer(index, kind, code)
            except BaseException:
                self._keep(plan, tensor)
                raise
        try:
            if not agreed and not self._wait(plan, index):
                return Outcome(False, name)
            self._sparing = 0
            self.served += 1
            self.bytes += plan.bytes
        except BaseException:
            self._keep(plan, tensor)
            raise
        finally:
            board.finish(index)
        try:
            self._reduce(plan, tensor, address, name)
        except BaseException:
            self._keep(plan, tensor)
            raise
        return DONE

    def _keep(self, plan: _Plan, tensor: torch.Tensor) -> None:
        if plan.at_once is not None:
            plan.at_once.keep(tensor)

    def _place(self, caller: CodeType) -> Place:
        """Where the user's program has called; `caller` is the code that has called allreduce_."""
        place = place_of_caller(_FRAMES + 1)
        if place.code is caller:
            self._caller = caller
        return place

    def _wait(self, plan: _Plan, index: int) -> bool:
        """Whether all ranks do thing number `index` at once, where that was not plain at first sight."""
        if self._express.wait(index):
            return True
        self._sparing = min(MOST_SPARING, 2 * self._sparing + 1)
        if plan.at_once is not None:
            plan.at_once.forget()
        return False

    def _reduce(self, plan: _Plan, tensor: torch.Tensor, address: int, name: str) -> None:
        """A large tensor, on the plane; if a peer is slow meanwhile, wait with reports of who is missing."""
        negotiator, express = self._negotiator, self._express
        self._large += 1
        negotiator.steps[_STEPS] = self._large
        routine = None if plan.at_once is None else plan.at_once.begin(tensor)
        if routine is None:
            elements = (plan.pieces.get(address) or plan.piece(address)).elements
            routine = express.reduction(elements, tensor, plan.arithmetic, plan.number)
        ended: list[Task[None]] = []
        if express.lane.drive(routine, ended.append):
            return
        key = (STEP, _STEPS)
        negotiator.enter_step(key, self._large, place_of_caller(), name, express.lane.fail)
        try:
            negotiator.wait(key, lambda: bool(ended), None)
        finally:
            negotiator.leave_step(key)
        error = ended[0].error
        if error is not None:
            raise error


@lru_cache(maxsize=4096)
def code_of(text: str) -> int:
    """A number of 64 bits for a text, the same on all ranks; above those of unnamed operations."""
    return _NAMED | int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


ways: dict[int | None, ExpressAllreduce] = {}
"""The express ways of this process, by the numbers of the process sets."""

os.register_at_fork(after_in_child=ways.clear)
