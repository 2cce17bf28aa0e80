"""The calls of a group of torch.distributed, one after the other on an op queue of its own.

    call n      every member numbers its calls: call n of one is call n of all. No name, no agreement.
    drive       where nothing is in flight, a thread that waits takes the steps of its call itself; so does any caller
                that has no core to spare for the loop, or the end of backward for those from within it
    submit      all else waits in the op queue, and the loop advances it

A call that takes longer than its timeout ends the group: nobody knows any more where the others are. The error names
the members that have not made that call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend, on_device
from hvlike.backends.cuda.runtime import KINDS, events_of, runtime_of
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.backends.operation import Operation
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import Context, current, is_running
from hvlike.collectives.session.process_set_state import ProcessSetState, stall_limits
from hvlike.errors import HorovodInternalError, MismatchError, PeerLeftError, ShutdownError, StalledError
from hvlike.system.system import system
from hvlike.torch_distributed.directory import describe_calls, describe_missing, directory_of
from hvlike.torch_distributed.work import Work
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import dtype_name
from hvlike.untraced import untraced

logger = logging.getLogger("hvlike")

LATE_SECONDS = 0.05  # How long the end of a backward waits for peers before the loop goes on alone
_SHOWN = 3  # Tensors of a call that its description shows
_REMEMBERED = 16  # Calls that a member can still describe where another one has called something else


_ADVICE = "Every member has to make the same calls in the same order; threads need a group each."


class CallQueue:
    def __init__(self, context: Context, set_state: ProcessSetState, queue: OpQueue, name: str, seconds: float) -> None:
        """queue: of the set, for these calls alone. name: of the group, the same on all members. seconds: timeout."""
        self.set_state = set_state
        self.group = set_state.group
        self.name = name
        self.seconds = seconds
        self._context = context
        self.fabric = context.fabric
        self.loop = context.fabric.loop
        self.made = 0  # Calls so far
        self._records: deque[Any] = deque(maxlen=_REMEMBERED)
        self.queue = queue
        self._overlaps = context.overlaps
        self._report_seconds = stall_limits(context.knobs).report_seconds
        self._lock = system.Lock()
        self._pending: dict[int, Work] = {}
        self._held: deque[tuple[Job, Work]] = deque()  # Calls that nobody has begun yet
        self._driver = 0  # The thread that drives calls, one after the other
        self._backward = self._last_backward = -1  # By autograd's number: the one with calls held, and the last one
        self._of_backward: list[Work] = []
        self._expiring = False
        self._failed: Work | None = None  # The call that has lost the group
        self._told = False  # The other members know why the group is lost
        self._directory = directory_of(context)
        self._directory.groups[name] = self

    @property
    def is_open(self) -> bool:
        """False once hvlike was shut down, or has started again."""
        return is_running() and current() is self._context

    def call(
        self,
        what: str,
        job: Job,
        tensors: Sequence[torch.Tensor],
        outputs: Any,
        *,
        also: Any = (),
        waits: bool,
        seconds: float | None = None,
    ) -> Work:
        """Make the next call. Any thread.

        what: its name in errors. job: what each member does. tensors: that it works on, all on one device. outputs: the
        result of the work. also: more tensors that the job uses, in lists. waits: the caller is about to wait for it.
        seconds: its timeout; None: that of the group.
        """
        mpi_library.check_not_forked()
        kind = tensors[0].device.type if tensors else "cpu"
        limit = self.seconds if seconds is None else seconds
        with self._lock:
            self.made += 1
            self._records.append((self.made, what, [(each.dtype, each.shape) for each in tensors[:_SHOWN]]))
            work = Work(self, self.made, what, outputs, limit)
            if kind in KINDS:
                job = self._on_device(kind, job, tensors, also, work)
            self._pending[work.number] = work
            work.operation.then(partial(self._ended, work))
            self._held.append((job, work))
            if self._driver and self._driver != get_ident():
                return work
            if self._driver or kind in KINDS or (self._overlaps and not waits):
                # This thread drives already where a callback of a future that has ended makes the call.
                self._hand_over(wake=self._driver > 0 or not waits)
                return work
            if not waits and self._waits_for_backward(work):
                return work
            self._driver = get_ident()
        self._drive(waits=waits)
        return work

    def _hand_over(self, *, wake: bool) -> None:
        """Leave what is held to the loop; with the lock held."""
        while self._held:
            job, work = self._held.popleft()
            self.queue.run(job, work.operation, wake=wake)

    def _drive(self, *, waits: bool) -> None:
        """Drive what is held, in its order, as far as nothing before it is in the loop. This thread alone may."""
        try:
            while True:
                try:
                    job, work = self._held.popleft()
                except IndexError:
                    return
                self.queue.run(job, work.operation, drive=True, wake=not waits)
                if work.waited_for or not (work.ended or waits):
                    # Another thread waits for it; or the background thread has to go on, as this one does not wait.
                    self.loop.post(_nothing)
        finally:
            with self._lock:
                self._driver = 0
                self._hand_over(wake=True)

    def _ended(self, work: Work, operation: Operation) -> None:
        self._pending.pop(work.number, None)
        if operation.error is not None:
            # The first has lost the group; those after it, of other threads say, end so.
            self._failed = self._failed or work
        work.tell()

    def _waits_for_backward(self, work: Work) -> bool:
        """Leave a call that is made in backward to the end of it: there is no core to spare before. With the lock held.

        torch's DDP then waits for its buckets in C++, but only after what is called back here has driven them.
        """
        backward = torch._C._current_graph_task_id()
        if backward in (-1, self._last_backward):
            return False
        if backward != self._backward:
            self._backward, self._of_backward = backward, []
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._of_backward.append(work)
        return True

    @untraced
    def _after_backward(self) -> None:
        self._last_backward = self._backward
        self._drive_held()
        works, self._of_backward = self._of_backward, []
        if not self.loop.wait(lambda: all(each.ended for each in works), LATE_SECONDS):
            # A peer is late, and what it waits for may come after this backward.
            self.loop.post(_nothing)

    def _drive_held(self) -> None:
        """Drive what is held, unless another thread does that."""
        with self._lock:
            if not self._held or self._driver:
                return
            self._driver = get_ident()
        self._drive(waits=True)

    def flush(self) -> None:
        """Have the loop do what is held. Any thread."""
        if self._held:
            with self._lock:
                if not self._driver:
                    self._hand_over(wake=True)

    def _on_device(self, kind: str, job: Job, tensors: Sequence[torch.Tensor], also: Any, work: Work) -> Job:
        runtime, device, ready = runtime_of(kind), tensors[0].device, events_of(kind, tensors)
        assert runtime is not None
        work.devices = [device]

        def opening(host: Backend) -> Coroutine[DeviceBackend | None]:
            return (yield from self.set_state.executor.site.devices.open(host, runtime, device))

        def run(host: Backend) -> Coroutine[None]:
            yield from on_device(self.queue, opening, job, ready)(host)
            backend = self.queue.device
            assert backend is not None
            backend.keep([tensors, work.outputs, also])
            work.operation.fence = backend.fence(work.outputs)

        return run

    def wait_for(self, work: Work, seconds: float | None) -> None:
        """Wait until a work has ended, at most so many seconds; reports who is missing in a long wait."""
        mpi_library.check_not_forked()
        work.waited_for = True
        self._drive_held()
        until = None if seconds is None else system.monotonic() + seconds
        turn = min((each for each in (self._report_seconds, seconds) if each is not None), default=None)
        while not self.loop.wait(lambda: work.ended, turn):
            missing = describe_missing(self._directory.ask_all(self, work), work.number)
            if work.ended:
                return
            text = f"{self._name(work)} has taken {system.monotonic() - work.began:.1f} s. {missing}"
            if until is not None and system.monotonic() >= until:
                raise StalledError(text)
            logger.warning("%s", text)

    # -- timeouts, in the loop --------------------------------------------------------------------

    def watch(self) -> None:
        """Has a call taken longer than it may? A few times a second, in the loop."""
        # A long backward does not keep the others waiting.
        self.flush()
        self._tell()
        pending = list(self._pending.values())
        if pending and not self._expiring:
            first = min(pending, key=lambda each: each.deadline)
            if first.deadline < system.monotonic():
                self._expiring = True
                self.loop.start(self._expire(pending[0], first.limit), wake=False)

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
            self.queue.fail(StalledError(f"{text}. {missing} {_ADVICE}"))

    def _tell(self) -> None:
        """Tell the other members if this one has lost the group: they would wait for it. In the loop."""
        lost = self.queue.broken
        if lost is not None and not self._told:
            self._told = True
            if not isinstance(lost, ShutdownError):
                # The others raise PeerLeftError, too, where a rank was lost.
                kind = PeerLeftError if isinstance(lost, PeerLeftError) else HorovodInternalError
                self._directory.tell(self, kind(str(lost)))

    def follow(self, rank: int, reason: HorovodInternalError) -> None:
        """Another member has lost the group: what waits for it here would wait for ever. In the loop."""
        if self.queue.broken is None:
            self._told = True
            self.queue.fail(type(reason)(f"rank {rank} cannot go on in the group {self.name!r}: {reason}"))

    def explained(self, error: BaseException, work: Work) -> BaseException:
        """The error to raise for a call: with what each member has called, where that does not fit. Blocks a moment."""
        if not isinstance(error, MismatchError) or error is not self.queue.broken:
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
        return (
            f"rank {self.fabric.world.rank}: call {work.number}, {work.what}, of the group {self.name!r} with "
            f"{name_ranks(self.group.ranks)},"
        )

    def end(self, error: BaseException) -> None:
        """End what is in flight, and every later call. Any thread but the loop's."""
        self.loop.perform(lambda: self.queue.fail(error))
        # What is held during a backward ends, too: a future of it may be waited for in C++.
        self.flush()

    def close(self) -> None:
        """The group is destroyed on this rank. Any thread but the loop's; blocks for a moment."""
        self.loop.perform(self._tell)
        self._directory.groups.pop(self.name, None)
        self.end(ShutdownError(f"the group {self.name!r} of torch.distributed was destroyed on this rank"))


def _nothing() -> None:
    pass
