"""An op queue: one backend of a group and the jobs that wait for it, run one by one in the order they came.

Every rank must submit the same jobs in the same order. That order is agreed per op queue, so whatever has an
order of its own (the negotiated requests of a process set, the plan of an optimizer) has an op queue of its own.

    held        given, and nobody has started it: a thread that is about to wait may drive it
    waiting     started; the loop takes it when its turn comes
    running     it has the turn: a thread takes its steps as long as they move, or the loop does
    ended       well or with an error; an error ends all that comes after it, too
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from hvlike.backends.base import Backend, SoloBackend
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.network.cost_model import TYPICAL, MeasuredNetwork, measure
from hvlike.backends.network.network import Network
from hvlike.backends.operation import Operation, Waiter
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.in_place_shm import SharedAllocations
from hvlike.backends.shared_memory.region import Region, region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.errors import HorovodInternalError, LaunchError, ShutdownError
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, Task, Wait
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
        self._jobs: deque[tuple[Coroutine[None], Operation]] = deque()  # That have not begun
        self._held = False  # Threads may drive these; the loop takes none before somebody starts them
        self._turn = Lock()  # Taken as long as a job is running, by the thread that drives it or for the loop
        self._driver = 0  # The thread that drives, or tells how what it has driven has ended
        self._running: Task[None] | None = None  # What the loop has
        self.broken: BaseException | None = None
        self.peer_left: HorovodInternalError | None = None
        """Why a rank of the group takes no part any more; the reason where another rank gives a job up for that."""

    def run(
        self, job: Job, operation: Operation | None = None, *, drive: bool = False, wake: bool = False
    ) -> Operation:
        """Do `job(backend)` after all that this queue was given before. One thread at a time gives it jobs.

        operation: what ends with what the job returns or raises; None: a new one. drive: the caller is about to wait.
        Where nothing else is in flight here, its thread takes the steps of the job as long as they move. All else is
        for the loop. wake: nobody is about to drive that. Raises: what is no Exception (KeyboardInterrupt), once the
        operation has ended with it.
        """
        operation = operation or Operation()
        if drive and not self._jobs and self._threads_may_drive() and self._turn.acquire(blocking=False):
            self._drive(self._work(job, operation), operation, wake=wake)
        else:
            self.give(job, operation)
            self.start(wake=wake)
        return operation

    def give(self, job: Job, operation: Operation, *, hold: bool = False) -> None:
        """Put a job behind all that this queue was given before, for `start`. One thread at a time gives it jobs.

        hold: threads may drive it, and the loop leaves it alone until then, unless it is still to come to others.
        """
        self._held = hold and (self._held or not self._jobs)
        self._jobs.append((self._work(job, operation), operation))

    def start(self, *, drive: bool = False, wake: bool = False) -> None:
        """Have all jobs begin that it was given. Any thread. drive, wake: as in `run`, for those that are held."""
        # What is called back here may start jobs, which shall not be driven one within the other.
        if drive and self._driver != get_ident():
            wake = self._drive_held(wake)
        if self._jobs:
            self._held = False
            loop = self._fabric.loop
            if loop.drives_here:
                self._look()
            else:
                loop.post(self._look, wake=wake)

    def flush(self) -> None:
        """Leave what is held to the loop, unless a thread drives it already. Any thread."""
        if self._held and self._jobs and not self._driver:
            self.start(wake=True)

    def wait(self, operation: Operation, seconds: float | None = None, block: Waiter | None = None) -> bool:
        """Block until an operation of this queue has ended; False when `seconds` have passed before. Any thread.

        block: what waits in the loop, and perhaps tells other ranks of it.
        """
        self.start(drive=True)
        operation.awaited = True
        return (block or self._fabric.loop.wait)(operation.done, seconds)

    def _threads_may_drive(self) -> bool:
        return self.drives and self.broken is None and not self.recorder.on

    def _work(self, job: Job, operation: Operation) -> Coroutine[None]:
        operation.begin()
        operation.value = yield from job(self.backend)

    def _take(self, *, held: bool) -> tuple[Coroutine[None], Operation] | None:
        """Take the turn and the next job; None where another one is running, or the next is not for who asks."""
        while self._jobs and self._held is held and self._turn.acquire(blocking=False):
            if self._jobs and self._held is held:
                return self._jobs.popleft()
            self._turn.release()
        return None

    def _drive_held(self, wake: bool) -> bool:
        """Drive what is held, in its order, in this thread. Returns whether to wake the loop for what is left."""
        me, driven = get_ident(), False
        try:
            while self._threads_may_drive() and (taken := self._take(held=True)) is not None:
                self._driver = me
                if not self._drive(*taken, wake=wake):
                    return wake
                driven = True
        finally:
            if self._driver == me:
                self._driver = 0
        # What is left is of other threads: this one may go on without waiting.
        return wake or driven

    def _drive(self, work: Coroutine[None], operation: Operation, *, wake: bool) -> bool:
        """Take the steps of a job in this thread, with the turn. False where a peer lets it wait: the loop can sleep
        meanwhile, and has the turn now.
        """
        error: BaseException | None = None
        moves = True
        try:
            moves = self._advance(work)
        except BaseException as raised:
            error = self._lose(raised)
            if not isinstance(raised, Exception):
                operation.end(error)
                raise
        finally:
            if moves:
                self._turn.release()
                if self._jobs and not self._held:
                    # The loop has looked at what came meanwhile, and the turn was taken.
                    self._fabric.loop.post(self._look)
        if not moves:
            self._fabric.loop.post(partial(self._begin, work, operation), wake=wake)
            return False
        operation.end(error)
        if operation.awaited:
            # By another thread, which may sleep.
            self._fabric.loop.post(_nothing)
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
        """Have the loop take the next job, if it may. In the loop."""
        taken = self._take(held=False)
        if taken is not None:
            self._begin(*taken)

    def _begin(self, work: Coroutine[None], operation: Operation) -> None:
        """Start or go on with a job that has the turn. In the loop."""
        if self.broken is not None:
            # It may have begun: the queue was ended while a thread drove it.
            work.close()
            work = self._refuse(self.broken)
        self._running = self._fabric.loop.start(work, partial(self._ended, operation), wake=False)

    def _ended(self, operation: Operation, task: Task[None]) -> None:
        operation.end(None if task.error is None else self._lose(task.error))
        self._running = None
        self._turn.release()
        self._look()

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
        return not (self._jobs or self._turn.locked())

    def fail(self, error: BaseException) -> None:
        """End what runs and what waits with `error`. From inside the loop."""
        self.broken = self.broken or error
        self._fabric.plan_epoch.advance()
        if self.device is not None:
            self.device.abort(error)
        if self._running is not None:
            self._fabric.loop.cancel(self._running, error)
        self._held = False
        self._look()

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


def _nothing() -> None:
    pass


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
