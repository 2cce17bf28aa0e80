"""The running hvlike of this process: made by init(), ended by shutdown(), with settings that all ranks agree on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvlike.collectives.controller.inline_calls import inline_allreduces
from hvlike.collectives.health.departures import Departures, Errors
from hvlike.collectives.health.shutdown_barrier import EXIT, SHUTDOWN, ShutdownBarrier
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.job_settings import JobSettings
from hvlike.collectives.session.process_set_state import (
    ProcessSetState,
    Registry,
    ranks_of,
    stall_limits,
    what_is_wrong,
)
from hvlike.errors import (
    HorovodInternalError,
    NotInitializedError,
    PeerLeftError,
    RestartError,
    ShutdownError,
    UsageError,
    WrongTypeError,
)
from hvlike.system.system import of_process, system
from hvlike.transport.fabric import Fabric
from hvlike.transport.failure.exit_status import keep_record
from hvlike.transport.failure.fault_tolerance import RUNNING, Job, as_error
from hvlike.transport.failure.guard import Guard, give_up
from hvlike.transport.failure.heartbeat import Heartbeat, heartbeat_limit
from hvlike.transport.failure.watchdog import Liveness, init_watchdog
from hvlike.transport.host import mpi_library, rank_variables
from hvlike.transport.host.topology import has_spare_core
from hvlike.transport.loop.coroutine import Task
from hvlike.transport.world import World

logger = logging.getLogger("hvlike")


_FINISH_SECONDS = 5.0


class Context:
    def __init__(self, comm: Any, process_sets: Sequence[ProcessSet], gradients: str | None = None) -> None:
        """Collective and blocking: every rank of `comm`."""
        settings = JobSettings(gradients)
        self.knobs = knobs = settings.knobs
        self.world = World.start(
            comm,
            ranks_per_node=knobs.ranks_per_node,
            patience=knobs.init_patience,
            limit=knobs.stall_shutdown_seconds,
            serialized=knobs.mpi_threads_disable,
            spares=knobs.spares,
            check=settings.check,
        )
        self.place = self.world.place  # What the program is told
        self.before_close: list[Callable[[], None]] = []
        self.lost: dict[int, HorovodInternalError] = {}  # Ranks that were lost, under fault tolerance
        self.restarts = False  # Whether every wait ends with an error when a rank is lost, as elastic.run starts again
        self._ends = False  # Whether it can only be left: communicators were revoked, or it is to start again
        world, end = self.world, lambda: self.close(EXIT)
        self.guard = Guard(world.mpi, world.rank, str(world), end, on_first_node=world.on_first_node)
        self._given = list(process_sets)
        self._restarted = isinstance(comm, Job)
        with init_watchdog(knobs.init_patience, knobs.stall_shutdown_seconds, give_up):
            if self.world.job is not None and (self.world.job.waits or self._restarted):
                process_sets = self._sets_of_survivors(self.world.job)
            self._connect(process_sets, settings)
        if knobs.launch_record is not None:
            is_spare = world.job is not None and world.job.waits
            keep_record(knobs.launch_record, writes=world.rank == 0 and not is_spare)
        self.guard.install()
        if self.world.mpi.COMM_WORLD.Get_size() == 1:
            # The guard watches jobs of several ranks; alone, the loop's thread must still end before its memory does.
            system.at_exit(self.close)

    def _connect(self, process_sets: Sequence[ProcessSet], settings: JobSettings) -> None:
        knobs = self.knobs
        # Sets that have lost ranks may have become alike, and after a restart all have those of rank 0.
        new_sets = () if self._restarted else process_sets
        try:
            self._check_same(new_sets, settings.misplaced(self.world))
        except UsageError:
            # Raised on every rank or on none, so the communicators can be freed; the user may call init() again.
            self.world.close()
            raise
        if system.mpi is None:
            rank_variables.set_at_start(os.environ, self.world)
        self.fabric = Fabric(self.world, peer_memory=knobs.peer_memory)
        self.departures = Departures(self.fabric.loop)
        try:
            self._open(process_sets, settings)
        except BaseException:
            # Its thread would go on calling MPI, beside what gives this start up and what starts again.
            self.fabric.close()
            raise

    def _open(self, process_sets: Sequence[ProcessSet], settings: JobSettings) -> None:
        knobs = self.knobs
        self.guard.before_end.append(self.fabric.recorder.flush)
        settings.apply(self.fabric)
        self._processes = {rank: bell.process for rank, bell in self.fabric.bells.items()}
        # Under fault tolerance MPI is told who is lost, and asked.
        self._liveness = Liveness({} if self.world.job is not None else self._processes)
        self.registry = Registry(self.fabric, knobs, self.departures, lambda error: self._fail_all(error))
        self._shutdown_barrier = ShutdownBarrier(self.fabric, partial(self._part, in_order=True), stall_limits(knobs))
        self.fabric.ticks += [self.guard.watch_parent, self._watch]
        limit = heartbeat_limit(knobs.heartbeat_seconds, nodes=len(self.world.nodes))
        self._heartbeat = Heartbeat(self.fabric, self.guard, limit, self._lose) if limit else None
        if self._heartbeat is not None:
            self.fabric.ticks.append(self._heartbeat.tick)
        global_process_set.ranks = list(range(self.world.size))
        for process_set in (global_process_set, *process_sets):
            task = self.fabric.loop.start(self.registry.enroll(process_set), wake=False)
            self.fabric.loop.wait(partial(self._is_over, task))
            if not task.done:
                raise next(iter(self.lost.values()))
            if task.error is not None:
                raise task.error

    def _sets_of_survivors(self, job: Job) -> list[ProcessSet]:
        """The sets to register: rank 0 knows what ranks they have by now. A spare registers none until it is needed."""
        if job.waits:
            return []
        places = job.renumbered
        known = [[places[rank] for rank in each.ranks or () if rank in places] for each in self._given]
        told = self.world.comm.bcast(known, root=0)
        self._given += [ProcessSet(ranks or [0]) for ranks in told[len(self._given) :]]
        for process_set, ranks in zip(self._given, told, strict=False):
            if not ranks and process_set.ranks:
                logger.warning("%s: all ranks of the process set %s are lost.", self.world, process_set.ranks)
            process_set.ranks = ranks
        # One that rank 0 does not know was being added when a rank was lost.
        del self._given[len(told) :]
        job.settle()
        return [each for each in self._given if each.ranks]

    @property
    def sets(self) -> list[ProcessSet]:
        """The process sets to go on with after a restart, those that have lost all their ranks included."""
        registered = self.registry.shared_sets()[1:]
        if self.world.job is not None and self.world.job.waits:
            return self._given
        kept = [each for each in self._given if not each.ranks or each in registered]
        return kept + [each for each in registered if each not in kept]

    @property
    def overlaps(self) -> bool:
        """True when communication may start beside the computation."""
        overlap = self.knobs.overlap
        return has_spare_core(self.fabric.cores) if overlap is None else overlap

    def find_set(self, process_set: ProcessSet | None, what: str) -> ProcessSetState:
        mpi_library.check_not_forked()
        return self.registry.find(process_set, what)

    def close(self, reason: str = SHUTDOWN) -> None:
        """Leave the job and release everything. Collective in effect: waits until all ranks do."""
        if self.lost or self._ends:
            self.abandon()
            return
        for each in list(self.before_close):
            each()
        loop = self.fabric.loop
        if self.world.mpi.Is_finalized():
            # The user has finalized MPI: no rank can be reached any more.
            self.fabric.close()
            return
        for set_state in self.registry.set_states.values():
            for watch in list(set_state.controller.watches.values()):
                watch.look_at_end()
        try:
            loop.wait(
                lambda: all(each.queues.first.idle for each in self.registry.set_states.values()), _FINISH_SECONDS
            )
            error = ShutdownError("hvlike: Horovod has been shut down on this rank while the operation was in flight.")
            loop.post(lambda: self._fail_all(error), wake=False)
            self._shutdown_barrier.part(reason)
        except HorovodInternalError:
            if not self._ends:
                raise
        if self.lost or self._ends:
            self.abandon()
            return
        self.guard.uninstall()
        system.not_at_exit(self.close)
        self.fabric.close()
        self.fabric.recorder.stop()
        self.registry.close()
        self.world.close()

    def _is_over(self, task: Task[Any]) -> bool:
        return task.done or bool(self.lost)

    def abandon(self) -> None:
        """Leave the job without the others, of whom some are lost. Local. Under fault tolerance only: the others are
        told by the revoked communicators, and what MPI may still write to stays in memory.
        """
        error = next(iter(self.lost.values()), None) or ShutdownError("hvlike starts again on the survivors.")
        for each in list(self.before_close):
            each()
        if self._heartbeat is not None:
            self._heartbeat.conclude()
        loop = self.fabric.loop
        loop.post(lambda: self._fail_all(error), wake=False)
        self.guard.uninstall()
        system.not_at_exit(self.close)
        self.fabric.close()
        self.fabric.recorder.stop()
        if self.world.job is not None:
            self.world.job.revoke()
        self.registry.forget()

    def _watch(self) -> None:
        for set_state in self.registry.set_states.values():
            set_state.controller.watch()
        self.registry.watch_devices(system.monotonic())
        lost = sorted({*self._liveness.lost(), *self.world.lost()} - set(self.lost))
        if lost:
            self._lose({rank: PeerLeftError(self._describe_lost(rank)) for rank in lost})
        elif not self._ends and self.world.is_revoked():
            self._end_with(RestartError("Another rank has met an error, and starts again without lost ranks."))

    def _describe_lost(self, rank: int) -> str:
        process = self._processes.get(rank)
        where = f"it was process {process} on {self.world.host}" if process else "it was on another host"
        return f"The process of rank {rank} has vanished without a word; {where}."

    def _end_with(self, error: HorovodInternalError) -> None:
        """Get every thread out of its wait, so that the program can start again; in the loop."""
        self._ends = True
        others = set(range(self.world.size)).difference([self.world.rank], self.lost)
        self.departures.tell(dict.fromkeys(others, error))
        self._fail_all(error)
        self.fabric.loop.fail(error)

    def _fail_all(self, error: HorovodInternalError) -> None:
        for set_state in self.registry.set_states.values():
            set_state.fail(error)

    def _check_same(self, process_sets: Sequence[ProcessSet], unknown: str) -> None:
        """All ranks must name the same new sets of ranks that exist; all are told what is unknown here."""
        seen = [list(range(self.world.size))]
        for process_set in process_sets:
            if process_set.ranks is None:
                try:
                    process_set.ranks = ranks_of(process_set.mpi_comm, self.world)
                except UsageError as error:
                    unknown = str(error)
        answers = self.world.comm.allgather((unknown, [each.ranks for each in process_sets]))
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if wrong:
            raise UsageError(f"hvlike: Horovod initialization failed: {'; '.join(wrong)}")
        everybody = [ranks for _, ranks in answers]
        different = [rank for rank, other in enumerate(everybody) if other != everybody[0]]
        if different:
            raise UsageError(
                f"hvlike: Horovod initialization failed: rank 0 passed process_sets={everybody[0]}, rank "
                f"{different[0]} passed {everybody[different[0]]}. Pass the same process sets in the same "
                "order on every rank."
            )
        for number, ranks in enumerate(everybody[0]):
            reason = what_is_wrong(ranks, seen, self.world.size)
            if reason is not None:
                raise UsageError(
                    "hvlike: Horovod could not be initialized because process_sets entry number "
                    f"{number} cannot be: {reason}"
                )
            seen.append(ranks)

    def _lose(self, errors: Errors) -> None:
        """The processes of some ranks are lost; in the loop."""
        for rank in errors:
            self.fabric.channel.lose(rank)
        if self.world.job is not None:
            self.lost |= errors
            self._shutdown_barrier.lose()
        else:
            self.fabric.loop.start(self._shutdown_barrier.fail(next(iter(errors.values()))), wake=False)
        self._part(errors)

    def _part(self, errors: Errors, *, in_order: bool = False) -> None:
        """Some ranks have left, or are lost; in the loop."""
        self.departures.tell(errors, in_order=in_order)
        if self.restarts:
            self._end_with(next(iter(errors.values())))
            return
        self.registry.lose(errors)


class _Process:
    def __init__(self) -> None:
        self.context: Context | None = None


_process = of_process(_Process)


def current() -> Context:
    """The running context, in a forked child too. Raises: NotInitializedError before init() and after shutdown()."""
    context = _process.context
    if context is None:
        mpi_library.check_not_forked()
        raise NotInitializedError("hvlike: Horovod has not been initialized; use hvd.init().")
    return context


class Call(NamedTuple):
    """A call that has its number: what it is, what it runs in, and under which name."""

    what: str
    set_state: ProcessSetState
    name: str
    process_set: ProcessSet | None
    given_name: str | None

    def another(self, what: str, suffix: str) -> Call:
        """One more call that it takes, for its gradient say."""
        return begin(what, None if self.given_name is None else f"{self.given_name}.{suffix}", self.process_set)


def begin(what: str, name: str | None, process_set: ProcessSet | None) -> Call:
    """Number a call, even a wrong one: else this rank would meet the others' next operation in place of this one."""
    context = _process.context
    if context is None or process_set is not None or mpi_library.ForkMark.forked:
        set_state = current().find_set(process_set, what.capitalize())
    else:
        set_state = context.registry.set_states[0]
    set_state.proxies.check_present(what.capitalize())
    if name is None:
        full_name = set_state.controller.names.next(what)
    elif isinstance(name, str):
        full_name = str(name)
    else:
        raise WrongTypeError(f"{what}: name has to be a string, got {name!r}.")
    return Call(what, set_state, full_name, process_set, name)


def start_context(comm: Any, process_sets: Sequence[ProcessSet], gradients: str | None = None) -> None:
    """Make the context unless it is there. Raises: ForkedProcessError in a child that has inherited it."""
    mpi_library.check_not_forked()
    if _process.context is None:
        try:
            _process.context = Context(comm, process_sets, gradients)
        except Exception as error:
            job = RUNNING.job
            if job is not None:
                # The others may wait in their init() for what this rank does not do any more.
                job.revoke()
                raise as_error(job.mpi, error) from error
            raise


def stop_context() -> None:
    context, _process.context = _process.context, None
    inline_allreduces.by_set.clear()
    if context is not None:
        mpi_library.check_not_forked()
        context.close()


def abandon_context() -> None:
    """End hvlike here without the other ranks; under fault tolerance only."""
    context, _process.context = _process.context, None
    inline_allreduces.by_set.clear()
    if context is not None:
        context.abandon()


def is_running() -> bool:
    return _process.context is not None
