"""The calls of a group of torch.distributed, one after the other on an op queue of its own.

Every member numbers its calls: call n of one is call n of all. No name, no agreement. The op queue decides which thread
takes the steps of a call (backends/op_queue.py). Calls are held there as long as they may wait for a thread of torch's:

    of a GPU                        not held: it may call for the loop
    asynchronous, a core to spare   not held: the loop takes it at once
    the caller waits                started by the caller, in whichever thread it is: the main one, one of autograd's
    asynchronous, no core           started by the caller, who drives it as long as it moves; then the loop has it
    the same, in a node of backward held: the loop would take the core from the backward. Started by the end of that
                                    (`_Backward`), by any thread that waits for it, by the next call that is not held,
                                    by a look at `is_completed`, or by the watchdog, a few times a second in the loop

A call ends in the thread that drives it or in the loop; futures are completed there, or from the loop in a thread of
its pool. The watchdog (watchdog.py) knows what is in flight and how the group ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from hvlike.transport.loop.loop import Loop
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
        self.promises = self._directory.promises
        self.watchdog = Watchdog(name, queue, self._directory, context, stall_limits(context.knobs).report_seconds)
        self._tensor_queue = context.registry.set_states[0].controller.tensor_queue
        self._lock = system.Lock()
        self._backward: _Backward | None = None  # The last one in which a call was held
        self._directory.enter(self)

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
        self.begins_here()
        kind = tensors[0].device.type if tensors else "cpu"
        limit = self.seconds if seconds is None else seconds
        of_gpu = kind in KINDS
        drive = not of_gpu and (waits or not self._context.overlaps)
        with self._lock:
            work = Work(self, self.watchdog.number(what, tensors), what, outputs, limit)
            if of_gpu:
                job = self._on_device(kind, job, tensors, also, work)
            self.watchdog.begins(work)
            work.operation.then(partial(self._ended, work))
            self.queue.give(job, work.operation, hold=drive)
            if drive and not waits and self._waits_for_backward(work):
                return work
        self.queue.start(drive=drive, wake=not waits)
        return work

    def begins_here(self) -> None:
        """The calling thread begins something in this group: it may make calls that others wait for."""
        mpi_library.check_not_forked()
        if not self._tensor_queue.here.is_known:
            self._tensor_queue.know_thread()

    def _ended(self, work: Work, operation: Operation) -> None:
        self.watchdog.ends(work, operation)
        work.tell()

    def _waits_for_backward(self, work: Work) -> bool:
        """Leave a call to the end of the backward in which it is made, if it is one. With the lock held.

        torch's DDP then waits for its buckets in C++, but only after what is called back here has driven them.
        """
        number = torch._C._current_graph_task_id()
        # A hook of hvlike's DDP is called when the last node has run: nothing is left that this call could disturb.
        if number == -1 or torch._C._current_autograd_node() is None:
            return False
        backward = self._backward
        if backward is None or backward.number != number:
            self._backward = backward = _Backward(self.queue, self.loop, number)
        return backward.hold(work)

    def flush(self) -> None:
        """Have the loop do what is held. Any thread."""
        self.queue.flush()

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
        # What is held during a backward ends, too: a future of it may be waited for in C++.
        self.loop.perform(lambda: self.queue.fail(error))

    def close(self) -> None:
        """The group is destroyed on this rank. Any thread but the loop's; blocks for a moment."""
        self.loop.perform(self.watchdog.tell)
        self._directory.groups.pop(self.name, None)
        self.end(ShutdownError(f"the group {self.name!r} of torch.distributed was destroyed on this rank"))


class _Backward:
    """A backward in which calls are held, from the first of them to its end."""

    def __init__(self, queue: OpQueue, loop: Loop, number: int) -> None:
        """number: autograd's. Called within it, in the thread that runs it."""
        self.number = number
        self._queue = queue
        self._loop = loop
        self._works: list[Work] = []
        self._has_ended = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def hold(self, work: Work) -> bool:
        """Note that a call waits for the end; False where that has come: other functions are called back then, too."""
        if not self._has_ended:
            self._works.append(work)
        return not self._has_ended

    @untraced
    def _end(self) -> None:
        self._has_ended = True
        self._queue.start(drive=True)
        works, self._works = self._works, []
        if not self._loop.wait(lambda: all(work.ended for work in works), LATE_SECONDS):
            # A peer is late, and what it waits for may come after this backward: the background thread goes on.
            self._loop.post(_nothing)


def _nothing() -> None:
    pass
