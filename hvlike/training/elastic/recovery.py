"""A recovery: what elastic.run does between an error and the moment at which training goes on.

    noticed   by this rank; hvlike ends here, which brings the other ranks here, too
    agreed    under fault tolerance all that are left know that they start again
    rebuilt   hvlike runs again, with the ranks that are left
    restored  all are back at a commit that all have, and the program's reset callbacks were called
    reported  training goes on, and the recovery is dropped

Another loss can interrupt a recovery anywhere. It ends with an error then, and another recovery begins, on all ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.health.departures import Ending
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session import context
from hvlike.collectives.session.basics import init, rank, shutdown, size
from hvlike.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError, RestartError
from hvlike.system.system import system
from hvlike.training.elastic.state import State
from hvlike.transport.failure.fault_tolerance import Job

logger = logging.getLogger("hvlike")


class History:
    """What one recovery leaves to the next, in one call of a decorated function."""

    def __init__(self, retries: int, commits: int) -> None:
        self.retries = retries
        self.failures = 0  # Errors in a row, without a commit or a lost rank between them
        self.commits = commits  # How many there were when training went on last
        self.losses = 0
        self.note_running()

    def note_running(self) -> None:
        """Remember what hvlike is like that runs now: the next one may fail to start, and another one follow."""
        running = context.current()
        self.sets: Sequence[ProcessSet] = running.sets
        self.gradients = running.knobs.gradients
        self.size = running.place.size

    def failed(self, commits: int) -> None:
        """One more error, after so many commits."""
        self.failures = 1 if commits > self.commits else self.failures + 1

    def lost(self, losses: int) -> None:
        """So many processes are lost by now."""
        if losses > self.losses:
            self.losses, self.failures = losses, 0


class _Standing(NamedTuple):
    """What a rank tells the others once hvlike runs again."""

    failures: int
    skip_sync: bool
    goes_back: bool
    held: list[int] | None  # The commits that it has; None: it has not trained
    met: str | None  # The error, if it was not only told to start again


class Recovery:
    """Made when an error is noticed, or when a spare is called. `run` is called once."""

    def __init__(self, reason: Exception, state: State, job: Job | None, history: History) -> None:
        self.gives_up = False  # Whether the error of `run` is the end
        self._reason = reason
        self._state = state
        self._job = job
        self._history = history
        self._cause = ""  # The error behind all this, as it was on a rank that has met it
        self._noticed = self._agreed = self._rebuilt = system.monotonic()

    def run(self) -> None:
        """Start hvlike anew, go back to a commit that all have, and bring all ranks to the same state.

        Collective over the ranks that are left; blocks. Raises: HorovodInternalError, where another one is lost
        meanwhile or the ranks give up.
        """
        self._rebuild()
        while self._job is not None and self._job.waits:
            # There are ranks enough without this one.
            wait_as_spare(self._job)
            self._rebuild()
        standings = self._exchange()
        self._check_failures(max(each.failures for each in standings))
        self._go_back(standings)
        if not all(each.skip_sync and each.held is not None for each in standings):
            self._state.sync()
        self._check_size()
        self._report()

    def _rebuild(self) -> None:
        """Start hvlike anew: with the same ranks and process sets, or with those that are left. Collective; blocks."""
        if self._job is None:
            _start_all_anew()
            return
        if context.is_running():
            self._history.note_running()
            context.end_context(Ending.RESTART)
        if not self._job.has_answered:
            self._job.agree_on_end(False)
        self._agreed = system.monotonic()
        context.start_context(self._job, self._history.sets, self._history.gradients)
        context.current().membership.restarts = True
        self._rebuilt = system.monotonic()
        self._history.lost(self._job.losses)

    @property
    def _holds(self) -> bool:
        """Whether this process has a commit."""
        return self._job is None or self._job.holds

    def _exchange(self) -> list[_Standing]:
        """Tell all ranks where this one stands. Collective; blocks."""
        reason = self._reason
        text = f"{type(reason).__name__}: {reason}"
        own = _Standing(
            self._history.failures,
            skip_sync=isinstance(reason, HostsUpdatedInterrupt) and reason.skip_sync,
            goes_back=not isinstance(reason, HostsUpdatedInterrupt),
            held=self._state.held_commits() if self._holds else None,
            met=None if isinstance(reason, RestartError) else text,
        )
        standings: list[_Standing] = allgather_object(own, name="elastic.agree")
        self._cause = next((each.met for each in standings if each.met), text)
        return standings

    def _go_back(self, standings: Sequence[_Standing]) -> None:
        """Return to the newest commit that all have, if one of them needs that, and call reset callbacks. Local."""
        commits = [each.held for each in standings if each.held is not None]
        if any(each.goes_back for each in standings) and (self._holds or not commits):
            # Spares that are left alone: the ranks may have been lost while these took over their state.
            common = set(commits[0]).intersection(*commits) if commits else set()
            self._state.restore_commit(max(common, default=None))
        self._history.commits = self._state.commits
        self._state.on_reset()

    def _check_failures(self, failures: int) -> None:
        """Raise on all ranks if there were too many."""
        allowed, reason = self._history.retries, self._reason
        if failures > allowed:
            self.gives_up = True
            raise HorovodInternalError(
                f"elastic.run gives up: {failures} failures in a row without a commit between them, {allowed} "
                f"are allowed (@hvd.elastic.run(retries=...)). The last one on this rank: {type(reason).__name__}: "
                f"{reason}"
            ) from reason

    def _check_size(self) -> None:
        """Raise on all ranks if too few are left, after a durable commit of what they have."""
        least = context.current().knobs.min_ranks
        if size() < least:
            self.gives_up = True
            # Spares that are left alone have no commit.
            if self._state.durable is not None and self._state.commits:
                self._state.durable.write()
            raise HorovodInternalError(
                f"elastic.run gives up: {size()} of {self._history.size} ranks {'is' if size() == 1 else 'are'} left, "
                f"and HVLIKE_MIN_RANKS={least}. {self._cause}"
            ) from self._reason

    def _report(self) -> None:
        """Say what happened, now that training can go on."""
        if self._job is None:
            kind = type(self._reason).__name__
            logger.warning("rank %d: elastic.run has started again after %s: %s", rank(), kind, self._reason)
            return
        self._job.holds = True
        now = system.monotonic()
        recorder = context.current().fabric.recorder
        if recorder.on:
            event = {"reason": self._cause, "seconds": now - self._noticed}
            recorder.instant(recorder.row("elastic"), "RECOVERED", event)
        if rank() == 0:
            logger.warning(
                "elastic.run goes on with %d of %d ranks and %d spares from commit %d, %.3f s after it was noticed "
                "(agreed %.3f, rebuilt %.3f, restored %.3f). %s",
                size(),
                self._history.size,
                len(self._job.roles.spares),
                self._state.commits,
                now - self._noticed,
                self._agreed - self._noticed,
                self._rebuilt - self._agreed,
                now - self._rebuilt,
                self._cause,
            )


def wait_as_spare(job: Job) -> None:
    """Block until this process is to take part in a restart; ends its program if it will not be needed."""
    if job.agree_on_end(True, perform) and not job.only_spares:
        # Python's own way to end: the exit handlers run.
        sys.exit(0)


def perform(action: Callable[[], None]) -> None:
    """Have something done in the loop."""
    context.current().fabric.loop.perform(action)


def _start_all_anew() -> None:
    """Start hvlike anew with the same ranks and process sets, whatever was in flight. Collective; blocks."""
    if not context.is_running():
        raise NotInitializedError(
            "hvlike: Horovod has not been initialized; use hvd.init(). Call it before elastic.run."
        )
    running = context.current()
    world, sets, gradients = running.world, running.sets, running.knobs.gradients
    # The ranks may be some of the job's only: init(comm=...) was called with a list or a communicator.
    members, everybody = world.comm.Get_group(), world.mpi.COMM_WORLD.Get_group()
    try:
        ranks = list(world.mpi.Group.Translate_ranks(members, list(range(world.size)), everybody))
    finally:
        members.Free()
        everybody.Free()
    shutdown()
    init(ranks, process_sets=sets, gradients=gradients)
