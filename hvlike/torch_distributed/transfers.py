"""The sends and receives of a group, as works of torch.distributed: with its timeout, and until a rank is lost."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial

import torch

from hvlike.collectives.health.departures import Errors
from hvlike.collectives.session.context import Context
from hvlike.collectives.session.process_set_state import stall_limits
from hvlike.errors import ShutdownError, StalledError
from hvlike.system.system import system
from hvlike.torch_distributed.calls import CallQueue
from hvlike.torch_distributed.endpoint import Transfer
from hvlike.torch_distributed.point_to_point import PointToPoint
from hvlike.torch_distributed.work import Work
from hvlike.transport.host import mpi_library

logger = logging.getLogger("hvlike")

_ADVICE = "the other rank has not made the call that belongs to it, in the same group and with the same tag."


class Transfers:
    def __init__(self, context: Context, calls: CallQueue, ranks: Sequence[int]) -> None:
        """calls: of the same group; theirs are its name and its timeout. ranks: of the world, by position."""
        self.loop = calls.loop
        self.promises = calls.promises
        self._calls = calls
        self._context = context
        self._ranks = tuple(ranks)
        self._group = PointToPoint(context.fabric, calls.name, ranks)
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Work, Transfer]] = {}
        self._report_seconds = stall_limits(context.knobs).report_seconds
        context.fabric.ticks.append(self._watch)
        context.departures.listen(self._lose)
        context.before_close.append(self._shut_down)

    def send(self, tensors: Sequence[torch.Tensor], position: int, tag: int) -> Work:
        self._calls.begins_here()
        (tensor,) = tensors
        return self._work(
            f"send to {self._name(position)}, tag {tag},", self._group.send(tensor, position, tag), tensors
        )

    def recv(self, tensors: Sequence[torch.Tensor], position: int | None, tag: int) -> Work:
        """position: None: from any."""
        self._calls.begins_here()
        (tensor,) = tensors
        source = "any rank" if position is None else self._name(position)
        return self._work(f"recv from {source}, tag {tag},", self._group.recv(tensor, position, tag), tensors)

    def _name(self, position: int) -> str:
        return f"rank {self._ranks[position]}" if 0 <= position < len(self._ranks) else f"position {position}"

    def _work(self, what: str, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> Work:
        work = Work(self, next(self._numbers), what, list(tensors), self._calls.seconds)
        if not transfer.done:
            self._pending[work.number] = work, transfer
        transfer.add_done(partial(self._end, work, transfer))
        return work

    def _end(self, work: Work, transfer: Transfer) -> None:
        work.source = transfer.source
        work.operation.end(transfer.error)
        self._pending.pop(work.number, None)
        work.tell()

    def flush(self) -> None:
        """Have the loop do what the group's collectives hold back: somebody waits."""
        self._calls.flush()

    def wait_for(self, work: Work, seconds: float | None) -> None:
        """Wait until a work has ended, at most so many seconds; a long wait is reported."""
        mpi_library.check_not_forked()
        self.flush()
        until = None if seconds is None else system.monotonic() + seconds
        limit = min((each for each in (self._report_seconds, seconds) if each is not None), default=None)
        while not self.loop.wait(lambda: work.ended, limit):
            text = f"{self._describe(work)} has taken {_age(work):.1f} s: {_ADVICE}"
            if until is not None and system.monotonic() >= until:
                raise StalledError(text)
            logger.warning("%s", text)

    def explained(self, error: BaseException, work: Work) -> BaseException:
        """The error to raise for a transfer: it says all there is to say."""
        return error

    def _watch(self) -> None:
        """End what has taken too long; in the loop."""
        if not self._pending:
            return
        now = system.monotonic()
        for work, transfer in list(self._pending.values()):
            if work.deadline < now:
                text = f"{self._describe(work)} timed out after {_age(work):.1f} s, by a timeout of {work.limit:g} s"
                self._group.cancel(transfer, StalledError(f"{text}: {_ADVICE}"))

    def _describe(self, work: Work) -> str:
        return f"rank {self._context.world.rank}: {work.what} group {self._calls.name!r},"

    def _lose(self, errors: Errors) -> None:
        self._group.lose(errors, in_order=self._context.departures.in_order)

    def end(self, error: BaseException) -> None:
        """End what is in flight, and every later call."""
        self._group.close(error)

    def close(self) -> None:
        """The group is destroyed on this rank; a second call does nothing."""
        if self._watch not in self._context.fabric.ticks:
            return
        self._context.fabric.ticks.remove(self._watch)
        self._context.departures.ignore(self._lose)
        self._context.before_close.remove(self._shut_down)
        self.end(ShutdownError(f"the group {self._calls.name!r} of torch.distributed was destroyed on this rank"))

    def _shut_down(self) -> None:
        self.end(ShutdownError("hvlike: Horovod has been shut down on this rank while the operation was in flight."))


def _age(work: Work) -> float:
    return system.monotonic() - work.began
