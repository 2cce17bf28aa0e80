"""What inline allreduces know of the calls they serve: learned when a call is negotiated, for all that are plain.

The kind of a call (shape, dtype, op, factors) has a plan and a number that ranks can compare; a name has a code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.controller.controller import Controller
from hvlike.collectives.controller.inline_agreement import Agreement
from hvlike.collectives.controller.tensor_queue import automatic_name
from hvlike.collectives.requests.reduction import arithmetic_of, working_dtype
from hvlike.collectives.requests.request import CallSite, RequestKey, RequestSpec, find_call_site, first_tensor
from hvlike.errors import HorovodInternalError
from hvlike.observe.recorder import Recorder
from hvlike.system.system import of_process, system

MOST_KNOWN = 1024  # Kinds of calls, their memory and names that are remembered; with one more all are learned anew
MOST_SPARING = 63  # After refusals in a row only every 64th call is an attempt: that with a number all ranks attempt at
KIND = "allreduce"
INLINE = "inline allreduce"  # The order of those that take a while: under this reports know of waits in one
_FRAMES = 3  # Of the library, where the place of a call is found: allreduce_, attempt and call
_NAMED = 1 << 63
_AWAY_SECONDS = 1e-3
_Kind = tuple[torch.Size, torch.dtype, int, float, float]  # Shape, dtype, op, prescale and postscale
P = TypeVar("P")


class Tried(Enum):
    """What has become of an attempt."""

    NOT_AT_ALL = "not at all"  # The call has no number yet
    DONE = "done"


NOT_AT_ALL: Final = Tried.NOT_AT_ALL
DONE: Final = Tried.DONE
Outcome: TypeAlias = Literal[Tried.NOT_AT_ALL, Tried.DONE] | str
"""A string: the attempt was refused. The call is numbered, and is to be negotiated under this name."""


class Name(NamedTuple):
    key: RequestKey
    code: int
    place: CallSite  # Where in the program it was used first


class InlineCalls(Generic[P]):
    """P: the plan of a kind of calls."""

    def __init__(self, controller: Controller, agreement: Agreement, recorder: Recorder, size: int) -> None:
        self._controller = controller
        self._agreement: Agreement = agreement
        self._queue = controller.tensor_queue
        self._positions = controller.positions
        self._recorder = recorder
        self._size = size
        self._plans: dict[_Kind, P] = {}
        self._pieces: dict[Any, Any] = {}  # What is known of tensors of these kinds where they lie
        self._names: dict[str | None, Name] = {}
        self._busy = False
        self._interrupt: BaseException | None = None  # What is to be raised once the operation under way is in order
        self._away = False
        self._sparing = 0
        self.learned: set[RequestSpec] = set()  # What `learn` need not be told again
        self.served = 0  # Calls that were done here; the same on every rank after any of them
        self.bytes = 0

    def attempt(
        self, tensor: torch.Tensor, name: str | None, op: int | None, prescale: float, postscale: float
    ) -> Outcome:
        """Reduce in place, if all ranks of the set call this now with tensors alike. Blocks for a moment.

        Raises: HorovodInternalError as a negotiated call does.
        """
        raise NotImplementedError

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
            self._forget()
        arithmetic = arithmetic_of(tensor.dtype, op, self._size, spec.prescale, spec.postscale)
        self._plans[kind] = self._plan(arithmetic, tensor.numel(), spec)

    def set_away(self, away: bool) -> None:
        """This rank has joined, or all have. Waits for an attempt of another thread."""
        with self._queue.lock:
            self._away = away
        while self._busy:
            system.sleep(_AWAY_SECONDS)
        self._agreement.set_away(away)

    def _plan(self, arithmetic: Arithmetic, elements: int, spec: RequestSpec) -> P:
        """spec: of calls of this kind; `code_of(repr(spec))` is the same on all ranks."""
        raise NotImplementedError

    def _forget(self) -> None:
        self._plans.clear()
        self._pieces.clear()
        self.learned.clear()

    def _call(self, name: str | None) -> Name:
        place = find_call_site(_FRAMES)
        if name is None:
            number = self._controller.names.draw(KIND)
            return Name((KIND, automatic_name(number)), number, place)
        if len(self._names) >= MOST_KNOWN:
            self._names.clear()
        known = self._names[name] = Name((KIND, name), code_of(name), place)
        return known

    def _await(
        self, done: Callable[[], bool], number: int, name: str, stop: Callable[[HorovodInternalError], None]
    ) -> None:
        """Wait for the end of a reduction, with reports of who is missing."""
        place = find_call_site()
        self._controller.wait_in_order(INLINE, number, done, stop, place=place, detail=name, certain=False)

    def _refused(self, index: int, spec: RequestSpec, name: str, tensor: torch.Tensor) -> str:
        """Not all do operation number `index` at once: fewer attempts follow. Returns the name to negotiate it under.

        Raises: The interrupt that has come meanwhile. The operation is in flight then, as where a negotiated call is
        interrupted: the others count on this rank.
        """
        self._sparing = min(MOST_SPARING, 2 * self._sparing + 1)
        self._queue.recount(index)
        if self._interrupt is not None:
            self._controller.submit(spec, name, [tensor], first_tensor, counted=True)
            raise self._interrupt
        return name


@lru_cache(maxsize=4096)
def code_of(text: str) -> int:
    """A number of 64 bits for a text, the same on all ranks; above those of unnamed operations."""
    return _NAMED | int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _InlineAllreduces:
    def __init__(self) -> None:
        self.by_set: dict[int | None, InlineCalls[Any]] = {}  # By the numbers of the process sets


inline_allreduces = of_process(_InlineAllreduces)
os.register_at_fork(after_in_child=lambda: inline_allreduces.by_set.clear())
