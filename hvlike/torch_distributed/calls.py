"""The calls of a group of torch.distributed, one after the other on an op queue of its own.

    call n      every member numbers its calls: call n of one is call n of all. No name, no agreement.
    drive       where nothing is in flight, a thread that waits takes the steps of its call itself; so does any caller
                that has no core to spare for the loop, or the end of backward for those from within it
    submit      all else waits in the op queue, and the loop advances it

The watchdog (watchdog.py) knows what is in flight and how the group ends.
"""

from __future__ import annotations

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
from hvlike.collectives.session.context import Context, current, is_running
from hvlike.collectives.session.process_set_state import ProcessSetState, stall_limits
from hvlike.errors import ShutdownError
from hvlike.system.system import system
from hvlike.torch_distributed.directory import directory_of
from hvlike.torch_distributed.watchdog import Watchdog
from hvlike.torch_distributed.work import Work
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group
from hvlike.untraced import untraced

LATE_SECONDS = 0.05  # How long the end of a backward waits for peers before the loop goes on alone


class CallQueue:
    def __init__(self, context: Context, set_state: ProcessSetState, queue: OpQueue, name: str, seconds: float) -> None:
        """queue: of the set, for these calls alone. name: of the group, the same on all members. seconds: timeout."""
        self.set_state = set_state
        self.seconds = seconds
        self.queue = queue
        self.loop = context.fabric.loop
        self._context = context
        self._directory = directory_of(context)
        self.watchdog = Watchdog(name, queue, self._directory, self.loop, stall_limits(context.knobs).report_seconds)
        self._lock = system.Lock()
        self._held: deque[tuple[Job, Work]] = deque()  # Calls that nobody has begun yet
        self._driver = 0  # The thread that drives calls, one after the other
        self._backward = self._last_backward = -1  # By autograd's number: the one with calls held, and the last one
        self._of_backward: list[Work] = []
        self._directory.groups[name] = self

    @property
    def name(self) -> str:
        return self.watchdog.name

    @property
    def group(self) -> Group:
        return self.queue.group

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
            work = Work(self, self.watchdog.number(what, tensors), what, outputs, limit)
            if kind in KINDS:
                job = self._on_device(kind, job, tensors, also, work)
            self.watchdog.begins(work)
            work.operation.then(partial(self._ended, work))
            self._held.append((job, work))
            if self._driver and self._driver != get_ident():
                return work
            if self._driver or kind in KINDS or (self._context.overlaps and not waits):
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
        self.watchdog.ends(work, operation)
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
        work.waited_for = True
        self._drive_held()
        self.watchdog.wait(work, seconds)

    def explained(self, error: BaseException, work: Work) -> BaseException:
        """The error to raise for a call: with what each member has called, where that does not fit. Blocks a moment."""
        return self.watchdog.explained(error, work)

    def watch(self) -> None:
        """A few times a second, in the loop."""
        # A long backward does not keep the others waiting.
        self.flush()
        self.watchdog.watch()

    def end(self, error: BaseException) -> None:
        """End what is in flight, and every later call. Any thread but the loop's."""
        self.loop.perform(lambda: self.queue.fail(error))
        # What is held during a backward ends, too: a future of it may be waited for in C++.
        self.flush()

    def close(self) -> None:
        """The group is destroyed on this rank. Any thread but the loop's; blocks for a moment."""
        self.loop.perform(self.watchdog.tell)
        self._directory.groups.pop(self.name, None)
        self.end(ShutdownError(f"the group {self.name!r} of torch.distributed was destroyed on this rank"))


def _nothing() -> None:
    pass
