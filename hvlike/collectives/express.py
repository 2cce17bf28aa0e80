"""allreduce on the express way: a call that all ranks of a node make now is done in the calling thread, at once.

What it needs to know of a call (its tensor, op and factors, and a number made of them that ranks can compare) it learns
when the call goes the ordinary way, through the coordinator. Whatever is not plain goes there too; the outcome is the
same.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch

from hvlike.collectives.names import automatic_name
from hvlike.collectives.negotiator import Negotiator
from hvlike.collectives.operand import working_dtype
from hvlike.collectives.places import place_of_caller
from hvlike.collectives.reductions import Average, arithmetic_of
from hvlike.collectives.request import Signature
from hvlike.collectives.waits import STEP
from hvlike.observe.recorder import Recorder
from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.planes.at_once import AtOnce
from hvlike.planes.board import RING
from hvlike.planes.express import Express
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
"""Of the express way, below allreduce_."""

_STEPS = "allreduce on the express way"
_NAMED = 1 << 63
_Kind = tuple[torch.Size, torch.dtype, int, float, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    done: bool
    name: str
    """Under which it goes on in the ordinary way, where it is not done."""


DONE = Outcome(True, "")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known of calls of one kind."""

    shape: torch.Size
    dtype: torch.dtype
    op: int
    prescale: float
    postscale: float
    number: int
    arithmetic: Arithmetic
    copies: list[list[Piece]] | None
    """The memory of all ranks' copies, for small tensors: for each place on the board, in the order of the ranks."""
    bytes: int

    @property
    def key(self) -> _Kind:
        """What the plan is found by."""
        return (self.shape, self.dtype, self.op, self.prescale, self.postscale)

    at_once: AtOnce | None
    """What reduces large ones."""
    pieces: dict[int, Piece]
    """The elements at an address where such a tensor was. They keep no memory: a tensor that is there now does."""

    def piece(self, address: int) -> Piece:
        """The elements of a plain tensor in one row, without a copy."""
        piece = self.pieces.get(address)
        if piece is None:
            if len(self.pieces) >= MOST_PIECES:
                self.pieces.clear()
            piece = self.pieces[address] = self.arithmetic.over(bytes_at(address, self.bytes))
        return piece


_NO_PLAN = _Plan(
    torch.Size((-1,)),
    torch.bool,
    -1,
    1.0,
    1.0,
    -1,
    arithmetic_of(torch.bool, ReduceOp.MAX, 1, 1.0, 1.0),
    None,
    0,
    None,
    {},
)


class ExpressAllreduce:
    """The express way of one process set on one node."""

    def __init__(self, negotiator: Negotiator, express: Express, recorder: Recorder, size: int, rank: int) -> None:
        """size: of the set; rank: in it."""
        self._negotiator = negotiator
        self._express = express
        self._size = size
        self._rank = rank
        self._plans: dict[_Kind, _Plan] = {}
        self._last = _NO_PLAN
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
        with negotiator.lock:
            negotiator.on_entry = express.passed
            express.board.passed(negotiator.entered)

    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> Outcome | None:
        """Reduce in place, if all ranks of the set call this now with the like. Blocks for a moment.

        Returns None when nothing was tried; then nothing is known of the call to anybody.
        Raises: HorovodInternalError as the ordinary way does.
        """
        if op is None:
            op = Average
        plan = self._last
        if (
            plan.shape != tensor.shape
            or plan.dtype is not tensor.dtype
            or plan.op != op
            or plan.prescale != prescale
            or plan.postscale != postscale
        ):
            found = self._plans.get((tensor.shape, tensor.dtype, op, prescale, postscale))
            if found is None:
                return None
            plan = self._last = found
        if self._recorder.on or self._negotiator.entered & self._sparing:
            return None
        address = _address_of(tensor)
        if not address or self._away or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._attempt(plan, tensor, address, name)
        finally:
            self._lock.release()

    def learn(self, signature: Signature, tensor: torch.Tensor) -> None:
        """A call goes the ordinary way: remember what it is, if its like may take this one."""
        op, prescale, postscale = ReduceOp(signature.op), signature.prescale, signature.postscale
        if (tensor.shape, tensor.dtype, op, prescale, postscale) in self._plans:
            return
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        if op is ReduceOp.ADASUM or signature.strides != (None,) or not _address_of(tensor):
            return
        if working_dtype(tensor.dtype, op) is not tensor.dtype or not tensor.numel():
            return
        arithmetic = arithmetic_of(tensor.dtype, op, self._size, prescale, postscale)
        nbytes = tensor.numel() * tensor.element_size()
        small = self._express.is_small(nbytes)
        copies = self._express.copies(arithmetic, tensor.numel()) if small else None
        number = code_of(repr(signature))
        at_once = self._express.at_once(arithmetic, tensor.numel(), number)
        plan = _Plan(
            tensor.shape, tensor.dtype, op, prescale, postscale, number, arithmetic, copies, nbytes, at_once, {}
        )
        self._plans[plan.key] = plan

    def set_away(self, away: bool) -> None:
        """This rank has joined, or all have. Waits for an attempt of another thread."""
        with self._lock:
            self._away = away
            self._express.board.set_away(away)

    def _attempt(self, plan: _Plan, tensor: torch.Tensor, address: int, name: str | None) -> Outcome | None:
        board, negotiator = self._express.board, self._negotiator
        with negotiator.lock:
            index = negotiator.entered
            key = ("allreduce", name or "")
            if not board.is_free(index) or not negotiator.may_begin(key):
                return None
            if name is None:
                code = negotiator.names.draw("allreduce")
                name = automatic_name(code)
                key = ("allreduce", name)
            else:
                code = code_of(name)
            negotiator.notice(key, place_of_caller(_FRAMES))
            kind, copies, at_once = plan.number, plan.copies, plan.at_once
            if copies is not None and at_once is not None and at_once.is_shared(address):
                # Faster where it is. Ranks that differ in this hear a no, as the kinds of their calls do.
                kind, copies = kind ^ 1, None
            if copies is not None:
                plan.arithmetic.copy(copies[index % RING][self._rank], plan.piece(address))
            elif at_once is not None:
                at_once.foretell(address)
            board.begin(index, kind, code)
            negotiator.entered += 1
        try:
            if not self._agree(plan, address, index, copies):
                return Outcome(False, name)
            if copies is None:
                self._reduce(plan, tensor, address, name)
        except BaseException:
            if copies is None and at_once is not None:
                at_once.keep(tensor)
            raise
        return DONE

    def _agree(self, plan: _Plan, address: int, index: int, copies: list[list[Piece]] | None) -> bool:
        """Whether all ranks do thing number `index` at once; what lies in copies is reduced then."""
        try:
            if not self._express.agree(index):
                self._sparing = min(MOST_SPARING, 2 * self._sparing + 1)
                if plan.at_once is not None:
                    plan.at_once.forget()
                return False
            self._sparing = 0
            self.served += 1
            self.bytes += plan.bytes
            if copies is not None:
                self._quiet.run(plan.arithmetic.reduce_copies, copies[index % RING], plan.piece(address))
        finally:
            self._express.board.finish(index)
        return True

    def _reduce(self, plan: _Plan, tensor: torch.Tensor, address: int, name: str) -> None:
        """A large tensor, on the plane; if a peer is slow meanwhile, wait with reports of who is missing."""
        negotiator, express = self._negotiator, self._express
        self._large += 1
        negotiator.steps[_STEPS] = self._large
        routine = None if plan.at_once is None else plan.at_once.begin(tensor)
        if routine is None:
            routine = express.reduction(plan.piece(address), tensor, plan.arithmetic, plan.number)
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


def _address_of(tensor: torch.Tensor) -> int:
    """Where the elements lie, if in one row in host memory that may be written there; else 0."""
    try:
        plain = (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not (tensor.requires_grad or tensor.is_neg() or (tensor.dtype in _COMPLEX and tensor.is_conj()))
        )
        return tensor.data_ptr() if plain else 0
    except RuntimeError:
        # It is sparse, or stands for others in a transformation of torch.func.
        return 0


@lru_cache(maxsize=4096)
def code_of(text: str) -> int:
    """A number of 64 bits for a text, the same on all ranks; above those of unnamed operations."""
    return _NAMED | int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
