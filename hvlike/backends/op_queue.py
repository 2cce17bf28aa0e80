"""An op queue: one backend of a group and the jobs that wait for it, run one by one in the order they came.

Every rank must submit the same jobs in the same order. That order is agreed per op queue, so whatever has an
order of its own (the negotiated requests of a process set, the plan of an optimizer) has an op queue of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from hvlike.backends.base import Backend, SoloBackend
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.network.cost_model import TYPICAL, MeasuredNetwork, measure
from hvlike.backends.network.network import Network
from hvlike.backends.operation import Operation
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.in_place_shm import SharedAllocations
from hvlike.backends.shared_memory.region import Region, region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.errors import HorovodInternalError, LaunchError, ShutdownError
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, Task, Wait, second_driver
from hvlike.transport.world import Group

if TYPE_CHECKING:
    from hvlike.backends.cuda.device_backend import DeviceBackend

# A rank's staging slots; memory is taken from the system only as it is used. The second fits a container's 64 MB.
_BUDGETS = (2 << 20, 512 << 10, 64 << 10)

Job = Callable[[Backend], Coroutine[Any]]


class OpQueue:
    def __init__(self, fabric: Fabric, group: Group, number: int, backend: Backend) -> None:
        self.group = group
        self.number = number
        self._fabric = fabric
        self.backend = backend
        self.constants: MeasuredNetwork | None = None
        self.device: DeviceBackend | None = None
        self.recorder = fabric.recorder
        self.counters = fabric.counters
        self.drives = not isinstance(backend, SoloBackend)  # A thread that waits may take its steps
        self._calls_mpi = not isinstance(backend, SharedBackend)
        self.spin = fabric.spin  # How long `drive` waits before it leaves a job to the loop, which can sleep
        self._jobs: deque[tuple[Coroutine[None], Operation]] = deque()
        self._last: Operation | None = None  # What it was given last; all before that have ended when this has
        self._running: Task[None] | None = None
        self.broken: BaseException | None = None
        self.peer_left: HorovodInternalError | None = None
        """Why a rank of the group takes no part any more; the reason where another rank gives a job up for that."""
        self._driving = Lock()

    def run(
        self, job: Job, operation: Operation | None = None, *, drive: bool = False, wake: bool = False
    ) -> Operation:
        """Do `job(backend)` after all that this queue was given before. One thread at a time gives it jobs.

        operation: what ends with what the job returns or raises; None: a new one. drive: the caller is about to wait.
        Where nothing else is in flight here, its thread takes the steps of the job as long as they move. All else is
        for the loop. wake: nobody is about to drive that. Raises: StateError where another thread drives this queue;
        what is no Exception (KeyboardInterrupt), once the operation has ended with it.
        """
        operation = operation or Operation()
        alone = self._last is None or self._last.done()
        self._last = operation
        loop = self._fabric.loop
        work = self._work(job, operation)
        if drive and alone and self.drives and self.broken is None and not self.recorder.on:
            if self._drive(work, operation):
                return operation
            wake = False
        # In this order, whichever thread has the loop look at them first.
        self._jobs.append((work, operation))
        if loop.drives_here:
            self._look()
        else:
            loop.post(self._look, wake=wake)
        return operation

    def _work(self, job: Job, operation: Operation) -> Coroutine[None]:
        operation.begin()
        operation.value = yield from job(self.backend)

    def _drive(self, work: Coroutine[None], operation: Operation) -> bool:
        """Take the steps of a job in this thread. False where a peer lets it wait: the loop can sleep meanwhile."""
        if not self._driving.acquire(blocking=False):
            raise second_driver(f"op queue {self.number} of process set {self.group.number}")
        error: BaseException | None = None
        try:
            if not self._advance(work):
                return False
        except BaseException as raised:
            error = self._lose(raised)
            if not isinstance(raised, Exception):
                operation.end(error)
                raise
        finally:
            self._driving.release()
        operation.end(error)
        return True

    def _advance(self, work: Coroutine[None]) -> bool:
        """Take steps as long as they move; True when the job has ended."""
        until = 0.0
        try:
            if self._calls_mpi:
                # Only the loop's driver may.
                return self._fabric.loop.advance(work, self.spin.network_seconds)
            for wait in work:
                if wait is Wait.AGAIN:
                    until = 0.0
                    continue
                now = system.monotonic()
                if not until:
                    until = now + self.spin.queue_seconds
                elif now > until:
                    return False
                if self.spin.crowded:
                    # The rank that is waited for may need this core.
                    system.yield_core()
        except BaseException as error:
            # An interrupt between two steps: the job tells the peers that it ends here.
            work.throw(error)
            raise
        return True

    def _look(self) -> None:
        if self._running is None:
            self._next()

    def _next(self) -> None:
        if not self._jobs:
            self._running = None
            return
        work, operation = self._jobs.popleft()
        if self.broken is not None:
            # It may have begun: the queue was ended while a thread drove it.
            work.close()
            work = self._refuse(self.broken)
        self._running = self._fabric.loop.start(work, partial(self._ended, operation), wake=False)

    def _ended(self, operation: Operation, task: Task[None]) -> None:
        operation.end(None if task.error is None else self._lose(task.error))
        self._next()

    def _lose(self, error: BaseException) -> BaseException:
        """The error to raise where a job has ended with `error`: the ranks no longer agree on where they are."""
        if self.peer_left is not None and type(error) is HorovodInternalError:
            error = self.peer_left
        self.broken = self.broken or error
        return error

    def _refuse(self, error: BaseException) -> Coroutine[None]:
        yield from ()
        raise error

    @property
    def idle(self) -> bool:
        return self._running is None and not self._jobs

    def fail(self, error: BaseException) -> None:
        """End what runs and what waits with `error`. From inside the loop."""
        self.broken = self.broken or error
        self._fabric.plan_epoch.advance()
        if self.device is not None:
            self.device.abort(error)
        if self._running is not None:
            self._fabric.loop.cancel(self._running, error)

    def watch(self, now: float) -> HorovodInternalError | None:
        """End the queue if something has gone wrong on the device, and say what; a few times a second. In the loop."""
        error = None if self.device is None else self.device.watch(now)
        if error is not None:
            self.fail(error)
        return error

    def close(self) -> None:
        """Give the backend back; what still waits ends with ShutdownError. From inside the loop."""
        self.fail(ShutdownError("hvlike was shut down, or the process set removed, while this was in flight"))
        self.backend.close()


def open_queue(
    fabric: Fabric, group: Group, number: int, constants: MeasuredNetwork | None = None
) -> Coroutine[OpQueue]:
    """Make queue `number` of a group. Collective, in one order. Raises: LaunchError without shared memory.

    constants: of the network between the group's nodes; None: not measured yet.
    """
    if group.size == 1:
        return OpQueue(fabric, group, number, SoloBackend())
    shared = None
    if group.local_size > 1:
        shared = yield from _open_shared(fabric, group, number)
    if len(group.nodes) == 1 and shared is not None:
        return OpQueue(fabric, group, number, shared)
    cross = None
    whole = Network((yield from fabric.duplicate(group.comm)), group.ranks)
    if group.cross_comm != fabric.world.mpi.COMM_NULL:
        crossing = sorted(node[group.local_rank] for node in group.nodes)
        comm = yield from fabric.duplicate(group.cross_comm)
        sockets = fabric.sockets
        if constants is None and sockets is not None:
            eager_bytes = mpi_library.eager_bytes(fabric.world.mpi, os.environ)
            constants = yield from measure(comm, sockets, eager_bytes)
            fabric.spin.hear_sockets(sockets.carry)
        cross = Network(comm, [group.ranks[each] for each in crossing], constants or TYPICAL)
    backend = HierarchicalBackend(group, shared, cross, whole, crowded=fabric.job_is_crowded)
    queue = OpQueue(fabric, group, number, backend)
    queue.constants = constants
    return queue


def _open_shared(fabric: Fabric, group: Group, number: int) -> Coroutine[SharedBackend]:
    for budget in _BUDGETS:
        chunk = chunk_bytes(group.local_size, budget)
        nbytes = region_bytes(group.local_size, chunk)
        key = ("queue", group.number, number, budget)
        segment = yield from fabric.share(group, key, nbytes)
        if segment is not None:
            bells = [fabric.bells[group.ranks[position]] for position in group.node]
            ranks = group.local_size
            region = Region(segment, group.local_rank, ranks, chunk, bells, fabric.fence, spin=fabric.spin)
            members = [group.ranks[each] for each in group.node]
            processes = [fabric.bells[each].process for each in members] if fabric.reaches_peers else []
            memory = CmaMemory(processes, crowded=fabric.node_is_crowded)
            return SharedBackend(region, SharedAllocations(fabric.allocations, members), memory)
    raise LaunchError(
        f"the ranks {[group.ranks[each] for each in group.node]} on {fabric.world.host} cannot share even {nbytes} "
        "bytes: give /dev/shm more room (docker run --shm-size=256m)"
    )


class OpQueues:
    """The queues of a group on this rank: the first for negotiated requests, others for plans, reused when spare."""

    def __init__(self, fabric: Fabric, first: OpQueue) -> None:
        self.first = first
        self._fabric = fabric
        self._queues = [first]
        self._spare: deque[int] = deque()

    def all(self) -> tuple[OpQueue, ...]:
        return tuple(self._queues)

    def spare_numbers(self) -> list[int]:
        return list(self._spare)

    def set_spare(self, numbers: Iterable[int]) -> None:
        """Let these queues be the spare ones, in rising order; the same on every rank."""
        self._spare = deque(sorted(numbers))

    def propose(self) -> int:
        """The number of a spare queue, -1 if there is none; the caller hands it to `take` or to `give_back`.

        The lowest: owners that end together may give theirs back in another order on every rank.
        """
        for number in sorted(self._spare.copy()):
            with contextlib.suppress(ValueError):  # Another thread has it
                self._spare.remove(number)
                return number
        return -1

    def take(self, number: int) -> Coroutine[OpQueue]:
        """OpQueue `number`, or a new one for -1. Collective over the group, in the same order everywhere."""
        if number >= 0:
            if number in self._spare:
                # This rank has joined and takes what the others have chosen.
                self._spare.remove(number)
            return self._queues[number]
        queue = yield from open_queue(self._fabric, self.first.group, len(self._queues), self.first.constants)
        self._queues.append(queue)
        return queue

    def give_back(self, number: int) -> None:
        """The queue `number` is not used any more. Any thread, also a finaliser."""
        if number >= 0 and self._queues[number].broken is None:
            self._spare.append(number)
