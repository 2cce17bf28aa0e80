"""Inline allreduce: when all ranks of a node call at the same time, the calling thread reduces at once.

The tensor, op, factors and a number that ranks can compare are learned when a call is negotiated. Everything that is
not plain is negotiated, with the same result.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import KernelCall, SilentErrstate
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.inline_allreduce import InlineEngine
from hvlike.backends.shared_memory.board import FINISHED, RING
from hvlike.backends.shared_memory.inline_reduction import AS_SHARED, InlineReduction
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.tensor_queue import automatic_name
from hvlike.collectives.health.wait_for_graph import STEP
from hvlike.collectives.requests.reduction import Average, arithmetic_of, working_dtype
from hvlike.collectives.requests.request import CallSite, RequestKey, RequestSpec, find_call_site
from hvlike.observe.recorder import Recorder
from hvlike.transport.loop.coroutine import Task
from hvlike.transport.memory.dtypes import bytes_at

MOST_KNOWN = 1024  # Kinds of calls, their memory and names that are remembered; with one more all are learned anew
MOST_SPARING = 63  # After refusals in a row only every 64th call is an attempt: that with a number all ranks attempt at
_COMPLEX = (torch.complex64, torch.complex128)
_FRAMES = 3  # Of the library, where the place of a call is found: allreduce_, attempt and _call
_KIND = "allreduce"
_STEPS = "inline allreduce"
_NAMED = 1 << 63
_AWAY_SECONDS = 1e-3
_Kind = tuple[torch.Size, torch.dtype, int, float, float]  # Shape, dtype, op, prescale and postscale


class _Plan(NamedTuple):
    number: int  # The same on all ranks for the same kind
    arithmetic: Arithmetic
    copies: list[list[Piece]] | None  # Of small tensors, for each place on the board, in the order of the ranks
    at_once: InlineReduction | None


class _Piece(NamedTuple):
    """A plain tensor in one row, where one was. It keeps no memory: a tensor that is there now does."""

    shape: torch.Size
    dtype: torch.dtype
    op: int | None
    prescale: float
    postscale: float
    plan: _Plan
    at_once: InlineReduction | None
    is_complex: bool
    nbytes: int
    memory: memoryview
    slots: tuple[memoryview, ...]  # Where this rank copies it to, for each place on the board, if it is small
    calls: tuple[list[KernelCall], ...]  # What reduces the ranks' copies to it


class _Name(NamedTuple):
    key: RequestKey
    code: int
    place: CallSite  # Where in the program it was used first


class InlineAllreduce:
    def __init__(self, controller: Controller, inline: InlineEngine, recorder: Recorder, size: int, rank: int) -> None:
        self._controller = controller
        self._queue = tensor_queue = controller.tensor_queue
        self._inline = inline
        self._board = inline.board
        self._size = size
        self._rank = rank
        self._plans: dict[_Kind, _Plan] = {}
        self._pieces: dict[int, _Piece] = {}
        self._names: dict[str | None, _Name] = {}
        self._recorder = recorder
        self._busy = False
        self._away = False
        self._sparing = 0
        self.learned: set[RequestSpec] = set()  # What `learn` need not be told again
        self.served = 0  # Calls that were done here; the same on every rank after any of them
        self.bytes = 0
        self._large = 0
        self._run = SilentErrstate().run
        with tensor_queue.lock:
            inline.board.passed(tensor_queue.entered)
            tensor_queue.board = (inline.board.count, inline.others)

    # All in one frame: where the caches are cold, as after a backward, a call costs more than most statements.
    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> str | Literal[True] | None:
        """Reduce in place, if all ranks of the set call this now with tensors alike. Blocks for a moment.

        Returns True when it is done; the name under which to negotiate it where the others do not; None when nothing
        was tried. Raises: HorovodInternalError as a negotiated call does.
        """
        try:
            plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
            if not plain or tensor.requires_grad or tensor.is_neg():
                return None
            address = tensor.data_ptr()
        except RuntimeError:
            # It is sparse, or stands for others in a transformation of torch.func.
            return None
        piece = self._pieces.get(address)
        if (
            piece is None
            or piece.shape != tensor.shape
            or piece.dtype is not tensor.dtype
            or (piece.op != op or piece.prescale != prescale or piece.postscale != postscale)
        ):
            piece = self._piece(tensor, address, op, prescale, postscale)
        if piece is None or (piece.is_complex and tensor.is_conj()):
            return None
        at_once, number, slots = piece.at_once, piece.plan.number, piece.slots
        shared = at_once is not None and at_once.is_shared(address)
        if shared:
            # Faster where it is. Ranks that differ in this do not agree, as where the kinds of their calls differ.
            number, slots = number ^ AS_SHARED, ()
        tensor_queue, board = self._queue, self._board
        begun = offered = False
        try:
            with tensor_queue.lock:
                index = tensor_queue.entered
                if self._busy or self._away or self._recorder.on or index & self._sparing:
                    return None
                if (tensor_queue.closed or tensor_queue.requests) and not tensor_queue.may_begin((_KIND, name or "")):
                    return None
                if index != board.following and not board.is_free(index):
                    return None
                begun = self._busy = True
                key, code, place = self._names.get(name) or self._call(name)
                if slots:
                    slots[index % RING][:] = piece.memory
                elif shared and at_once is not None:
                    at_once.post(address)
                tensor_queue.entered = index + 1
                offered = True
                agreed = board.offer(index, number, code)
            if not tensor_queue.here.is_known:
                tensor_queue.know_thread()
            tensor_queue.last = (key, place, time.monotonic())
            if not agreed and not self._wait(at_once, index):
                return key[1]
            self._sparing = 0
            self.served += 1
            self.bytes += piece.nbytes
            if slots:
                run = self._run
                for function, arguments, keywords in piece.calls[index % RING]:
                    run(function, *arguments, **keywords)
            else:
                self._reduce(piece, address, shared, key[1])
        finally:
            if offered:
                board.mine[FINISHED] = index + 1
            if begun:
                self._busy = False
        return True

    def learn(self, spec: RequestSpec, tensor: torch.Tensor) -> None:
        """A call is negotiated: remember it, if calls like it may run inline."""
        op = ReduceOp(spec.op)
        if len(self.learned) >= MOST_KNOWN:
            self.learned.clear()
        self.learned.add(spec)
        kind = (tensor.shape, tensor.dtype, op, spec.prescale, spec.postscale)
        if kind in self._plans or spec.device != "cpu" or spec.strides != (None,) or not tensor.numel():
            return
        if op is ReduceOp.ADASUM or working_dtype(tensor.dtype, op) is not tensor.dtype:
            return
        if len(self._plans) >= MOST_KNOWN:
            self._plans.clear()
            self._pieces.clear()
            self.learned.clear()
        arithmetic = arithmetic_of(tensor.dtype, op, self._size, spec.prescale, spec.postscale)
        small = self._inline.is_small(tensor.numel() * tensor.element_size())
        copies = self._inline.copies(arithmetic, tensor.numel()) if small else None
        number = code_of(repr(spec))
        at_once = self._inline.at_once(arithmetic, tensor.numel(), number)
        self._plans[kind] = _Plan(number, arithmetic, copies, at_once)

    def set_away(self, away: bool) -> None:
        """This rank has joined, or all have. Waits for an attempt of another thread."""
        with self._queue.lock:
            self._away = away
        while self._busy:
            time.sleep(_AWAY_SECONDS)
        self._board.set_away(away)

    def _piece(
        self, tensor: torch.Tensor, address: int, op: int | None, prescale: float, postscale: float
    ) -> _Piece | None:
        """What is known of a plain tensor at an address, from now on; None where its kind is not known."""
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
        piece = self._pieces[address] = _Piece(
            shape, dtype, op, prescale, postscale, plan, plan.at_once, dtype in _COMPLEX, nbytes, raw.data, slots, calls
        )
        return piece

    def _call(self, name: str | None) -> _Name:
        place = find_call_site(_FRAMES)
        if name is None:
            number = self._controller.names.draw(_KIND)
            return _Name((_KIND, automatic_name(number)), number, place)
        if len(self._names) >= MOST_KNOWN:
            self._names.clear()
        known = self._names[name] = _Name((_KIND, name), code_of(name), place)
        return known

    def _wait(self, at_once: InlineReduction | None, index: int) -> bool:
        """Whether all ranks do thing number `index` at once, where that was not plain at first sight."""
        if self._inline.wait(index):
            return True
        self._sparing = min(MOST_SPARING, 2 * self._sparing + 1)
        if at_once is not None:
            at_once.forget()
        return False

    def _reduce(self, piece: _Piece, address: int, shared: bool, name: str) -> None:
        """A tensor that is not small, on the backend; where a peer is slow, wait with reports of who is missing."""
        controller, inline = self._controller, self._inline
        self._large += 1
        controller.steps[_STEPS] = self._large
        assert piece.at_once is not None
        coroutine = piece.at_once.begin(address, shared=shared)
        ended: list[Task[None]] = []
        if inline.queue.drive(coroutine, ended.append):
            return
        key = (STEP, _STEPS)
        controller.enter_step(key, self._large, find_call_site(), name, inline.queue.fail)
        try:
            controller.wait(key, lambda: bool(ended), None)
        finally:
            controller.leave_step(key)
        error = ended[0].error
        if error is not None:
            raise error


@lru_cache(maxsize=4096)
def code_of(text: str) -> int:
    """A number of 64 bits for a text, the same on all ranks; above those of unnamed operations."""
    return _NAMED | int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


inline_allreduces: dict[int | None, InlineAllreduce] = {}  # By the numbers of the process sets
os.register_at_fork(after_in_child=inline_allreduces.clear)
