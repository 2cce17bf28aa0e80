"""The calls of a group of torch.distributed, one after the other on an op queue of its own.

    call n      every member numbers its calls: call n of one is call n of all. No name, no agreement.
    drive       where nothing is in flight, a thread that waits takes the steps of its call itself; so does any caller
                that has no core to spare for the loop
    submit      all else waits in the op queue, and the loop advances it

A call that takes longer than its timeout ends the group: nobody knows any more where the others are. The error names
the members that have not made that call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend, on_device
from hvlike.backends.cuda.runtime import KINDS, events_of, runtime_of
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.collectives.health.status_query import ANSWER_SECONDS
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import Context
from hvlike.collectives.session.process_set_state import ProcessSetState, stall_limits
from hvlike.errors import ShutdownError, StalledError
from hvlike.observe.stacks import main_stack
from hvlike.torch_distributed.work import Work
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.messages.traffic import Topic

logger = logging.getLogger("hvlike")

Answer = tuple[int, str]  # How many calls a member has made in the group, -1: it has no such group; its stack


class CallQueue:
    def __init__(self, context: Context, set_state: ProcessSetState, queue: OpQueue, name: str, seconds: float) -> None:
        """queue: of the set, for these calls alone. name: of the group, the same on all members. seconds: timeout."""
        self.set_state = set_state
        self.group = set_state.group
        self.name = name
        self.seconds = seconds
        self.fabric = context.fabric
        self.loop = context.fabric.loop
        self.made = 0  # Calls so far
        self._queue = queue
        self._overlaps = context.overlaps
        self._report_seconds = stall_limits(context.knobs).report_seconds
        self._lock = threading.Lock()
        self._pending: dict[int, Work] = {}
        self._driving = False
        self._held: list[tuple[Job, Work]] = []  # What came while a thread drove a call
        self._expiring = False
        self._directory = directory_of(context)
        self._directory.groups[name] = self

    @property
    def backend(self) -> Backend:
        return self._queue.backend

    def call(
        self,
        what: str,
        job: Job,
        tensors: Sequence[torch.Tensor],
        outputs: Any,
        *,
        waits: bool,
        seconds: float | None = None,
    ) -> Work:
        """Make the next call. Any thread.

        what: its name in errors. job: what each member does. tensors: that it works on, all on one device. outputs: the
        result of the work. waits: the caller is about to wait for it. seconds: its timeout; None: that of the group.
        """
        mpi_library.check_not_forked()
        kind = tensors[0].device.type if tensors else "cpu"
        if kind in KINDS:
            job = self._on_device(kind, job, tensors)
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        with self._lock:
            self.made += 1
            work = Work(self, self.made, what, outputs, deadline)
            if self._queue.broken is not None:
                work.settle(self._queue.broken, in_loop=False)
                return work
            drives = not self._pending and kind not in KINDS and (waits or not self._overlaps)
            self._pending[work.number] = work
            if drives:
                self._driving = True
            elif self._driving:
                self._held.append((job, work))
            else:
                self._queue.submit(job, self._after(kind, work), wake=not waits)
        if drives:
            self._drive(job, work, waits=waits)
        return work

    def _drive(self, job: Job, work: Work, *, waits: bool) -> None:
        error: BaseException | None = None
        ended = True
        try:
            ended = self._queue.drive(job(self._queue.backend), work.end)
        except BaseException as raised:
            error = self._queue.lose(raised)
            if not isinstance(raised, Exception):
                raise
        finally:
            with self._lock:
                self._driving = False
                for held, its in self._held:
                    self._queue.submit(held, its.end)
                self._held.clear()
            if ended:
                work.settle(error, in_loop=False)
                if work.waited_for:
                    self.loop.post(_nothing)
            elif not waits:
                # Handed over quietly, as by a caller that waits next: have the background thread go on with it.
                self.loop.post(_nothing)

    def _on_device(self, kind: str, job: Job, tensors: Sequence[torch.Tensor]) -> Job:
        runtime, device = runtime_of(kind), tensors[0].device
        assert runtime is not None

        def opening(host: Backend) -> Coroutine[DeviceBackend | None]:
            return (yield from self.set_state.executor.site.devices.open(host, runtime, device))

        return on_device(self._queue, opening, job, events_of(kind, tensors))

    def _after(self, kind: str, work: Work) -> Callable[[Any], None]:
        if kind not in KINDS:
            return work.end

        def end(task: Any) -> None:
            device = self._queue.device
            if task.error is None and device is not None:
                device.keep(work.outputs)
                work.fence = device.fence(work.outputs)
            work.end(task)

        return end

    def forget(self, work: Work) -> None:
        """A work has ended."""
        self._pending.pop(work.number, None)

    def wait_for(self, work: Work, seconds: float | None) -> None:
        """Wait until a work has ended, at most so many seconds; reports who is missing in a long wait."""
        mpi_library.check_not_forked()
        work.waited_for = True
        if seconds is not None:
            work.deadline = min(work.deadline, time.monotonic() + seconds)
        while not self.loop.wait(lambda: work.ended, self._report_seconds):
            waited = time.monotonic() - work.began
            missing = self._directory.missing(self, work.number, lambda: work.ended)
            if not work.ended:
                logger.warning("%s has taken %.0f s. %s", self._describe(work), waited, missing)

    # -- timeouts, in the loop --------------------------------------------------------------------

    def watch(self) -> None:
        """Has a call taken longer than it may? A few times a second."""
        pending = list(self._pending.values())
        if pending and not self._expiring and min(each.deadline for each in pending) < time.monotonic():
            self._expiring = True
            self.loop.start(self._expire(pending[0]), wake=False)

    def _expire(self, work: Work) -> Coroutine[None]:
        """End the group, once it is known who is missing."""
        waited = time.monotonic() - work.began
        missing = yield from self._directory.ask(self, work.number, lambda: work.ended)
        self._expiring = False
        if not work.ended:
            advice = "Every member has to make the same calls in the same order."
            self._queue.fail(StalledError(f"{self._describe(work)} timed out after {waited:.1f} s. {missing} {advice}"))

    def _describe(self, work: Work) -> str:
        return (
            f"rank {self.fabric.world.rank}: {work.what}, call {work.number} of the group {self.name!r} with "
            f"{name_ranks(self.group.ranks)},"
        )

    def end(self, error: BaseException) -> None:
        """End what is in flight, and every later call. Any thread but the loop's."""
        self.loop.perform(lambda: self._queue.fail(error))

    def close(self) -> None:
        """The group is destroyed on this rank. Any thread but the loop's; blocks for a moment."""
        self._directory.groups.pop(self.name, None)
        self.end(ShutdownError(f"the group {self.name!r} of torch.distributed was destroyed on this rank"))


def _nothing() -> None:
    pass


class Directory:
    """The groups of this rank; asks the members of one how many calls they have made in it, and answers that."""

    def __init__(self, context: Context) -> None:
        self.groups: dict[str, CallQueue] = {}
        self._fabric = context.fabric
        self._answers: dict[tuple[str, int], Answer] = {}
        self._fabric.channel.listen(Topic.GROUP_CALLS, lambda rank, message, tensors: self._hear(rank, *message))
        self._fabric.ticks.append(self._watch)

    def _watch(self) -> None:
        for each in list(self.groups.values()):
            each.watch()

    def _hear(self, rank: int, name: str, answer: Answer | None) -> None:
        if answer is not None:
            self._answers[name, rank] = answer
            return
        group = self.groups.get(name)
        made = -1 if group is None else group.made
        self._fabric.channel.send(rank, Topic.GROUP_CALLS, (name, (made, main_stack())), kind="status")

    def missing(self, group: CallQueue, number: int, done: Callable[[], bool]) -> str:
        """Who has not made call `number`, in words. Blocks for a moment."""
        task = self._fabric.loop.start(self.ask(group, number, done), wake=False)
        self._fabric.loop.wait(lambda: task.done, 2 * ANSWER_SECONDS)
        return str(task.result or "")

    def ask(self, group: CallQueue, number: int, done: Callable[[], bool]) -> Coroutine[str]:
        others = [rank for rank in group.group.ranks if rank != self._fabric.world.rank]
        for rank in others:
            self._answers.pop((group.name, rank), None)
            self._fabric.channel.send(rank, Topic.GROUP_CALLS, (group.name, None), kind="status")
        until = time.monotonic() + ANSWER_SECONDS
        while (
            time.monotonic() < until and not done() and any((group.name, each) not in self._answers for each in others)
        ):
            yield Wait.NOTIFY
        answers = {rank: self._answers.pop((group.name, rank), None) for rank in others}
        return describe_missing(answers, number)


def describe_missing(answers: dict[int, Answer | None], number: int) -> str:
    """Who has not made call `number` of a group, from what each member has answered; None: nothing."""
    silent = [rank for rank, answer in answers.items() if answer is None]
    behind = {rank: answer for rank, answer in answers.items() if answer is not None and answer[0] < number}
    lines = []
    if behind:
        lines.append(f"Missing: {name_ranks(list(behind))}.")
    if silent:
        lines.append(f"No answer from {name_ranks(silent)} (stopped, or busy in a call that holds Python's lock).")
    for rank, (made, stack) in list(behind.items())[:4]:
        state = "has not made this group" if made < 0 else f"has made {made} calls in it"
        where = f" and is at\n{stack}\n" if stack else " and waits inside hvlike."
        lines.append(f"Rank {rank} {state}{where}")
    return " ".join(lines) or "All members have made this call: the data do not arrive."


_known: dict[Context, Directory] = {}


def directory_of(context: Context) -> Directory:
    if context not in _known:
        _known.clear()
        _known[context] = Directory(context)
    return _known[context]
