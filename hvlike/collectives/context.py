"""The running hvlike of this process: made by init(), ended by shutdown()."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvlike.collectives.express import ways
from hvlike.collectives.farewell import EXIT, SHUTDOWN, Farewell
from hvlike.collectives.lane_watch import LaneWatch
from hvlike.collectives.membership import Membership, stall_limits
from hvlike.collectives.process_set import ProcessSet, global_process_set
from hvlike.collectives.registry import Registry, ranks_of, what_is_wrong
from hvlike.collectives.settings import Settings
from hvlike.config import Knobs
from hvlike.errors import HorovodInternalError, NotInitializedError, PeerLeftError, ShutdownError, UsageError
from hvlike.transport import forks
from hvlike.transport.cores import has_spare_core
from hvlike.transport.fabric import Fabric
from hvlike.transport.guard import Guard, give_up
from hvlike.transport.impatience import impatience
from hvlike.transport.liveness import Liveness
from hvlike.transport.routine import Routine, Wait
from hvlike.transport.world import World

_LEFT_BEHIND_SECONDS = 1.0
_FINISH_SECONDS = 5.0


class Context:
    """World, transport and process sets of one rank, from init to shutdown."""

    def __init__(self, comm: Any, process_sets: Sequence[ProcessSet]) -> None:
        """Collective and blocking: every rank of `comm`."""
        settings = Settings()
        self._knobs = knobs = settings.knobs
        self.world = World.start(
            comm,
            ranks_per_node=knobs.ranks_per_node,
            patience=knobs.init_patience,
            limit=knobs.stall_shutdown_seconds,
            serialized=knobs.mpi_threads_disable,
            check=settings.check,
        )
        self.before_close: list[Callable[[], None]] = []
        """Called by `close` while everything still works."""
        self.when_lost: list[Callable[[dict[int, HorovodInternalError]], None]] = []
        """Told in the loop which ranks have left, and how."""
        self.guard = Guard(self.world, lambda: self.close(EXIT))
        with impatience(knobs.init_patience, knobs.stall_shutdown_seconds, give_up):
            self._connect(process_sets, settings)
        self.guard.install()
        if self.world.mpi.COMM_WORLD.Get_size() == 1:
            # The guard watches jobs of several ranks; alone, the loop's thread must still end before its memory does.
            atexit.register(self.close)

    def _connect(self, process_sets: Sequence[ProcessSet], settings: Settings) -> None:
        """Build what reaches the other ranks. Collective and blocking."""
        knobs = self._knobs
        try:
            self._check_same(process_sets, settings.misplaced(self.world))
        except UsageError:
            # Raised on every rank or on none, so the communicators can be freed; the user may call init() again.
            self.world.close()
            raise
        self.fabric = Fabric(self.world, peer_memory=knobs.peer_memory)
        settings.apply(self.fabric)
        self._liveness = Liveness({rank: bell.process for rank, bell in self.fabric.bells.items()})
        self.registry = Registry(self.fabric, knobs, lambda error: self._fail_all(error))
        self._lane_watch = LaneWatch(self.fabric, self.registry.memberships)
        self._farewell = Farewell(self.fabric, self._lose, stall_limits(knobs))
        self.fabric.ticks += [self.guard.watch_parent, self._watch]
        global_process_set.ranks = list(range(self.world.size))
        for process_set in (global_process_set, *process_sets):
            task = self.fabric.loop.start(self.registry.enroll(process_set), wake=False)
            self.fabric.loop.wait(partial(getattr, task, "done"))
            if task.error is not None:
                raise task.error

    @property
    def knobs(self) -> Knobs:
        """The settings of this job."""
        return self._knobs

    @property
    def overlaps(self) -> bool:
        """True when communication may start beside the computation."""
        overlap = self._knobs.overlap
        return has_spare_core(self.fabric.cores) if overlap is None else overlap

    def membership(self, process_set: ProcessSet | None, what: str) -> Membership:
        """The process set an operation runs in; None: all ranks.

        what: the operation, for the error texts.
        Raises: UsageError for a set that is not registered, or of which this rank is not a member.
        """
        forks.check()
        return self.registry.find(process_set, what)

    def close(self, reason: str = SHUTDOWN) -> None:
        """Part from the other ranks and give everything back. Collective in effect; waits until all do."""
        for each in list(self.before_close):
            each()
        loop = self.fabric.loop
        if self.world.mpi.Is_finalized():
            # The user has ended MPI himself: there is nobody left to talk to.
            loop.close()
            return
        loop.wait(lambda: all(each.lanes.first.idle for each in self.registry.memberships.values()), _FINISH_SECONDS)
        error = ShutdownError("Horovod has been shut down on this rank while the operation was in flight.")
        loop.post(lambda: self._fail_all(error), wake=False)
        self._farewell.part(reason)
        self.guard.uninstall()
        atexit.unregister(self.close)
        loop.close()
        self.fabric.recorder.stop()
        self.registry.close()
        self.world.close()

    def _watch(self) -> None:
        """The health check of the process sets; in the loop."""
        for membership in self.registry.memberships.values():
            membership.negotiator.watch()
        self._lane_watch.look(time.monotonic())
        lost = self._liveness.lost()
        if lost:
            self._lose(
                {rank: PeerLeftError(f"The process of rank {rank} has vanished without a word.") for rank in lost}
            )

    def _fail_all(self, error: HorovodInternalError) -> None:
        for membership in self.registry.memberships.values():
            membership.fail(error)

    def _check_same(self, process_sets: Sequence[ProcessSet], unknown: str) -> None:
        """All ranks must name the same sets, each of them a new one of ranks that exist.

        unknown: what is wrong on this rank; all ranks are told.
        """
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
            raise UsageError(f"Horovod initialization failed: {'; '.join(wrong)}")
        everybody = [ranks for _, ranks in answers]
        different = [rank for rank, other in enumerate(everybody) if other != everybody[0]]
        if different:
            raise UsageError(
                f"Horovod initialization failed: rank 0 passed process_sets={everybody[0]}, rank {different[0]} passed "
                f"{everybody[different[0]]}. Pass the same process sets in the same order on every rank."
            )
        for number, ranks in enumerate(everybody[0]):
            reason = what_is_wrong(ranks, seen, self.world.size)
            if reason is not None:
                raise UsageError(
                    f"Horovod could not be initialized because process_sets entry number {number} cannot be: {reason}"
                )
            seen.append(ranks)

    def _lose(self, errors: dict[int, HorovodInternalError]) -> None:
        """Some ranks have left; in the loop."""
        for each in self.when_lost:
            each(errors)
        for membership in self.registry.memberships.values():
            if set(errors) & set(membership.group.ranks):
                membership.negotiator.lose(errors)
                self.fabric.loop.start(self._abandon(membership, errors), wake=False)

    def _abandon(self, membership: Membership, errors: dict[int, HorovodInternalError]) -> Routine[None]:
        """End what runs, and what is still to come, with a rank that has left, once all it wrote could be taken."""
        until = time.monotonic() + _LEFT_BEHIND_SECONDS
        while time.monotonic() < until:
            yield Wait.BELL
        gone = next(rank for rank in errors if rank in membership.group.ranks)
        for lane in membership.lanes.all():
            lane.fail(errors[gone])


class _Process:
    """Holds the context of this process."""

    context: Context | None = None


_process = _Process()


def current() -> Context:
    """The running context.

    A forked child (a DataLoader worker, say) may ask for ranks and sizes; `membership` refuses it operations.
    Raises: NotInitializedError before init() and after shutdown().
    """
    context = _process.context
    if context is None:
        forks.check()
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return context


def start(comm: Any, process_sets: Sequence[ProcessSet]) -> None:
    """Make the context unless it is there.

    Raises: ForkedProcessError in a child that has inherited it.
    """
    forks.check()
    if _process.context is None:
        _process.context = Context(comm, process_sets)


def stop() -> None:
    """End the context if it is there."""
    context, _process.context = _process.context, None
    ways.clear()
    if context is not None:
        forks.check()
        context.close()


def is_running() -> bool:
    """True between init() and shutdown()."""
    return _process.context is not None
