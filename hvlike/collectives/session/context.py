"""The running hvlike of this process: made by init(), ended by shutdown(), with settings that all ranks agree on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvlike.collectives.controller.inline_calls import inline_allreduces
from hvlike.collectives.health.departures import Departures, Ending
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.job_settings import JobSettings
from hvlike.collectives.session.membership import Membership
from hvlike.collectives.session.process_set_state import ProcessSetState, Registry, ranks_of, what_is_wrong
from hvlike.errors import (
    HorovodInternalError,
    NotInitializedError,
    ShutdownError,
    UsageError,
    WrongTypeError,
)
from hvlike.system.system import of_process, system
from hvlike.transport.fabric import Fabric
from hvlike.transport.failure.exit_status import keep_record
from hvlike.transport.failure.fault_tolerance import RUNNING, Job, as_error
from hvlike.transport.failure.guard import Guard, give_up
from hvlike.transport.failure.watchdog import init_watchdog
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
            patience=knobs.stall_check_seconds,
            limit=knobs.stall_shutdown_seconds,
            serialized=knobs.mpi_threads_disable,
            spares=knobs.spares,
            check=settings.check,
        )
        self.place = self.world.place  # What the program is told
        self.before_close: list[Callable[[], None]] = []  # What every ending calls first
        world = self.world
        self._guard = Guard(world.mpi, world.rank, str(world), self._exit, on_first_node=world.on_first_node)
        self._given = list(process_sets)
        self._restarted = isinstance(comm, Job)
        with init_watchdog(knobs.stall_check_seconds, knobs.stall_shutdown_seconds, give_up):
            if self.world.job is not None and (self.world.job.waits or self._restarted):
                process_sets = self._sets_of_survivors(self.world.job)
            self._connect(process_sets, settings)
        if knobs.launch_record is not None:
            is_spare = world.job is not None and world.job.waits
            keep_record(knobs.launch_record, writes=world.rank == 0 and not is_spare)
        self._guard.install()
        if self.world.mpi.COMM_WORLD.Get_size() == 1:
            # The guard watches jobs of several ranks; alone, the loop's thread must still end before its memory does.
            system.at_exit(self._exit)

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
        self._guard.before_end.append(self.fabric.recorder.flush)
        settings.apply(self.fabric)
        self.registry = Registry(self.fabric, knobs, self.departures)
        self.fabric.ticks.append(self._guard.watch_parent)
        self.membership = Membership(self.fabric, self._guard, self.registry, self.departures, knobs)
        global_process_set.ranks = list(range(self.world.size))
        for process_set in (global_process_set, *process_sets):
            task = self.fabric.loop.start(self.registry.enroll(process_set), wake=False)
            self.fabric.loop.wait(partial(self._is_over, task))
            if not task.done:
                raise next(iter(self.membership.lost.values()))
            if task.error is not None:
                raise task.error

    def _sets_of_survivors(self, job: Job) -> list[ProcessSet]:
        """The sets to register: rank 0 knows what ranks they have by now. A spare registers none until it is needed."""
        if job.waits:
            return []
        places = job.roles.renumbered
        known = [[places[rank] for rank in each.ranks or () if rank in places] for each in self._given]
        told = self.world.comm.bcast(known, root=0)
        self._given += [ProcessSet(ranks or [0]) for ranks in told[len(self._given) :]]
        for process_set, ranks in zip(self._given, told, strict=False):
            if not ranks and process_set.ranks:
                logger.warning("%s: all ranks of the process set %s are lost.", self.world, process_set.ranks)
            process_set.ranks = ranks
        # One that rank 0 does not know was being added when a rank was lost.
        del self._given[len(told) :]
        job.roles = job.roles.settled()
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

    def end(self, ending: Ending) -> None:
        """End hvlike on this rank; see Ending. Blocks where it waits for the other ranks.

        Raises: PeerLeftError or StalledError, where the other ranks do not come.
        """
        for act in list(self.before_close):
            act()
        if self.world.mpi.Is_finalized():
            self.fabric.close()
        elif ending is not Ending.RESTART and self._wait_for_all(ending):
            self._stop()
            self.registry.close()
            self.world.close()
        else:
            self._leave_alone()

    def _exit(self) -> None:
        self.end(Ending.EXIT)

    def _wait_for_all(self, ending: Ending) -> bool:
        """Stay until all ranks have come to their end; return False where they will not."""
        membership, loop = self.membership, self.fabric.loop
        if membership.is_broken:
            return False
        for set_state in self.registry.set_states.values():
            for watch in list(set_state.proxies.watches.values()):
                watch.look_at_end()
        try:
            loop.wait(
                lambda: all(each.queues.first.idle for each in self.registry.set_states.values()), _FINISH_SECONDS
            )
            error = ShutdownError("hvlike: Horovod has been shut down on this rank while the operation was in flight.")
            loop.post(lambda: self.registry.fail(error), wake=False)
            membership.barrier.part(ending)
        except HorovodInternalError:
            if not membership.given_up:
                raise
        return not membership.is_broken

    def _leave_alone(self) -> None:
        """Leave without the others. Under fault tolerance only: revoked communicators tell them, and what MPI may
        still write to stays in memory.
        """
        lost = self.membership.lost.values()
        error = next(iter(lost), None) or ShutdownError("hvlike starts again on the survivors.")
        self.membership.conclude()
        self.fabric.loop.post(lambda: self.registry.fail(error), wake=False)
        self._stop()
        if self.world.job is not None:
            self.world.job.revoke()
        self.registry.forget()

    def _stop(self) -> None:
        """End what runs beside the program, and what was to run at its exit."""
        self._guard.uninstall()
        system.not_at_exit(self._exit)
        self.fabric.close()
        self.fabric.recorder.stop()

    def _is_over(self, task: Task[Any]) -> bool:
        return task.done or bool(self.membership.lost)

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


class _CurrentContext:
    def __init__(self) -> None:
        self.context: Context | None = None


_process = of_process(_CurrentContext)


def current() -> Context:
    """The running context, in a forked child too. Raises: NotInitializedError before init() and after shutdown()."""
    context = _process.context
    if context is None:
        mpi_library.check_not_forked()
        raise NotInitializedError("hvlike: Horovod has not been initialized; use hvd.init().")
    return context


class BegunCall(NamedTuple):
    """A call that has its number: what it is, what it runs in, and under which name."""

    what: str
    set_state: ProcessSetState
    name: str
    process_set: ProcessSet | None
    given_name: str | None

    def another(self, what: str, suffix: str) -> BegunCall:
        """One more call that it takes, for its gradient say."""
        return begin(what, None if self.given_name is None else f"{self.given_name}.{suffix}", self.process_set)


def begin(what: str, name: str | None, process_set: ProcessSet | None) -> BegunCall:
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
    return BegunCall(what, set_state, full_name, process_set, name)


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


def end_context(ending: Ending) -> None:
    """End the context if there is one. Raises: ForkedProcessError in a child that has inherited it."""
    context, _process.context = _process.context, None
    inline_allreduces.by_set.clear()
    if context is not None:
        mpi_library.check_not_forked()
        context.end(ending)


def is_running() -> bool:
    return _process.context is not None
