"""How a group of torch.distributed ends: calls that take too long, members that are lost, calls that do not fit.

    wait        a thread that waits long reports who is missing; the search for deadlocks hears of it
    watch       a call that takes longer than its timeout ends the group: nobody knows any more where the others are
    tell        the other members hear why this one cannot go on, and end the group, too

The errors name the members that have not made a call, and what each has called.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from hvlike.backends.op_queue import OpQueue
from hvlike.backends.operation import Operation, Waiter
from hvlike.collectives.health.wait_for_graph import GROUP
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import Context
from hvlike.errors import DeadlockError, HorovodInternalError, MismatchError, PeerLeftError, ShutdownError, StalledError
from hvlike.system.system import system
from hvlike.torch_distributed.directory import Directory, describe_calls, describe_missing
from hvlike.torch_distributed.work import Work
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, in_loop
from hvlike.transport.memory.dtypes import dtype_name

_log = logging.getLogger("hvlike")

_SHOWN = 3  # Tensors of a call that its description shows
_REMEMBERED = 16  # Calls that a member can still describe where another one has called something else

# A program that has chosen a shorter timeout may count on it: its waits are left to that.
LONG_SECONDS: float = default_pg_timeout.total_seconds()
_OF_ALL = ("all_reduce", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor")  # None can do without a member
_OF_ALL_THAT_BRING = ("all_gather", "gather", "all_to_all")  # Whoever gets something of each

_ADVICE = "Every member has to make the same calls in the same order; threads need a group each."


class Watchdog:
    """Knows the calls of this rank in one group."""

    def __init__(
        self, name: str, queue: OpQueue, directory: Directory, context: Context, report_seconds: float | None
    ) -> None:
        """report_seconds: a wait is reported each time it has taken so long; None: never."""
        self.name = name
        self.group = queue.group
        self.made = 0  # Calls so far
        self._queue = queue
        self._directory = directory
        self._loop = context.fabric.loop
        self._controller = context.registry.set_states[0].controller  # Of all ranks: they may wait in different groups
        self._report_seconds = report_seconds
        self._records: deque[Any] = deque(maxlen=_REMEMBERED)
        self._pending: dict[int, Work] = {}
        self._expiring = False
        self._failed: Work | None = None  # The call that has lost the group
        self._told = False  # The other members know why the group is lost

    def number(self, what: str, tensors: Sequence[torch.Tensor]) -> int:
        """This rank makes its next call; returns its number. One thread at a time."""
        self.made += 1
        self._records.append((self.made, what, [(each.dtype, each.shape) for each in tensors[:_SHOWN]]))
        return self.made

    def begins(self, work: Work) -> None:
        self._pending[work.number] = work

    def ends(self, work: Work, operation: Operation) -> None:
        self._pending.pop(work.number, None)
        if operation.error is not None:
            # The first has lost the group; those after it, of other threads say, end so.
            self._failed = self._failed or work

    def wait(self, work: Work, seconds: float | None) -> None:
        """Wait until a work has ended, at most so many seconds; reports who is missing in a long wait."""
        mpi_library.check_not_forked()
        until = None if seconds is None else system.monotonic() + seconds
        turn = min((each for each in (self._report_seconds, seconds) if each is not None), default=None)
        block: Waiter = self._loop.wait
        serves = self._loop.thread_pool.limit > 0  # What other ranks call here may make calls, too
        if seconds is None and work.limit >= LONG_SECONDS and not serves and _needs_all(work, self.group.size):
            key, detail = (GROUP, self.name), self._call(work)
            block = partial(self._controller.wait, key, number=work.number, detail=detail)
        while not self._queue.wait(work.operation, turn, block):
            missing = describe_missing(self._directory.ask_all(self, work), work.number)
            if work.ended:
                return
            text = f"{self._name(work)} has taken {system.monotonic() - work.began:.1f} s. {missing}"
            if until is not None and system.monotonic() >= until:
                raise StalledError(text)
            _log.warning("%s", text)

    # -- in the loop ----------------------------------------------------------------------------

    def watch(self) -> None:
        """Has a call taken longer than it may? A few times a second."""
        self.tell()
        pending = list(self._pending.values())
        if pending and not self._expiring:
            first = min(pending, key=lambda each: each.deadline)
            if first.deadline < system.monotonic():
                self._expiring = True
                self._loop.start(self._expire(pending[0], first.limit), wake=False)

    def _expire(self, work: Work, limit: float) -> Coroutine[None]:
        """End the group, once it is known who is missing. work: what the group waits for. limit: the timeout, of it or
        of a later call.
        """
        waited = system.monotonic() - work.began
        answers = yield from self._directory.ask(self, work)
        self._expiring = False
        if not work.ended:
            missing = describe_missing(answers, work.number)
            text = f"{self._name(work)} timed out after {waited:.1f} s, by a timeout of {limit:g} s"
            self._queue.fail(StalledError(f"{text}. {missing} {_ADVICE}"))

    def tell(self) -> None:
        """Tell the other members if this one has lost the group: they would wait for it."""
        lost = self._queue.broken
        if lost is not None and not self._told:
            self._told = True
            if not isinstance(lost, ShutdownError):
                # The others raise PeerLeftError, too, where a rank was lost.
                kind = PeerLeftError if isinstance(lost, PeerLeftError) else HorovodInternalError
                self._directory.tell(self, kind(str(lost)))

    @in_loop
    def stop(self, error: HorovodInternalError) -> None:
        """Members wait for each other in different groups; all ranks are told."""
        self._told = True
        self._queue.fail(error)

    def follow(self, rank: int, reason: HorovodInternalError) -> None:
        """Another member has lost the group: what waits for it here would wait for ever."""
        if self._queue.broken is None:
            self._told = True
            self._queue.fail(type(reason)(f"rank {rank} cannot go on in the group {self.name!r}: {reason}"))

    # -- any thread -----------------------------------------------------------------------------

    def explained(self, error: BaseException, work: Work) -> BaseException:
        """The error to raise for a call: with what each member has called, where that does not fit. Blocks a moment."""
        if not isinstance(error, MismatchError) or isinstance(error, DeadlockError) or error is not self._queue.broken:
            return error
        failed = self._failed or work
        calls = describe_calls(self._directory.ask_all(self, failed))
        others = f", but {calls}" if calls else ""
        text = f"{self._name(failed)} is {self.describe(failed.number)} here{others}. {_ADVICE} ({error})"
        if failed is not work:
            text = f"{work.what}, call {work.number}, ended with an earlier one: {text}"
        return type(error)(text)

    def describe(self, number: int) -> str:
        """Call `number` as this rank has made it; empty where that was long ago."""
        for each, what, tensors in list(self._records):
            if each == number:
                return f"{what}({', '.join(f'{dtype_name(dtype)} {list(shape)}' for dtype, shape in tensors)})"
        return ""

    def _name(self, work: Work) -> str:
        return f"rank {self.group.ranks[self.group.rank]}: {self._call(work)},"

    def _call(self, work: Work) -> str:
        return f"call {work.number}, {work.what}, of the group {self.name!r} with {name_ranks(self.group.ranks)}"


def _needs_all(work: Work, size: int) -> bool:
    """Whether a call cannot end here before each member has made it; False if that is not clear.

    The receiver of a broadcast, say, needs nobody but the root.
    """
    if work.what in _OF_ALL:
        return True
    parts = work.outputs
    return (
        work.what in _OF_ALL_THAT_BRING
        and len(parts) == size
        and all(isinstance(part, torch.Tensor) and part.numel() for part in parts)
    )
