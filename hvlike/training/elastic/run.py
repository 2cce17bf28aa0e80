"""elastic.run: call a training function until it ends well, going back to a commit after an error or a lost rank.

                 sync()          func(state)        all have returned
    start -----> IN STEP -----> TRAINING ---------> agreed ----------> result
                   ^               |                                     ^
                   |  on_reset()   | HorovodInternalError: restore();    | told that training is over: ends
                   +--- RESTART <--+ HostsUpdatedInterrupt: keep state   |
                           ^                                             |
                           +------------- SPARE: waits, without training +

What RESTART is depends on how the job was started. By a plain mpirun: shutdown() and init() with the same ranks, as a
lost rank ends the job. By `mpirun --with-ft ulfm`: the survivors make a new world, in which spares take the numbers of
lost ranks (hvlike/transport/failure/fault_tolerance.py).

An error need not reach all ranks. Those that meet it shut hvlike down, or revoke its communicators; whatever the others
wait for then fails, which brings them here too. At the end all agree that all have returned: each process says once for
each communicator of the job whether it is done (`Job.agree`), a spare when it begins to wait.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, overload

from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.health.departures import Ending
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session import context
from hvlike.collectives.session.basics import init, is_initialized, rank, shutdown, size
from hvlike.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NotInitializedError,
    RestartError,
    ShutdownError,
    UsageError,
    WrongTypeError,
)
from hvlike.system.system import system
from hvlike.training.elastic.durable import ended, kept, prepare
from hvlike.training.elastic.state import State
from hvlike.transport.failure import exit_status, fault_tolerance
from hvlike.transport.failure.fault_tolerance import Job
from hvlike.transport.host.find_mpirun import OPEN_MPI, family_of_library
from hvlike.version import page

logger = logging.getLogger("hvlike")

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def run(func: Function) -> Function: ...


@overload
def run(*, retries: int = 3) -> Callable[[Function], Function]: ...


def run(func: Any = None, *, retries: int = 3) -> Any:
    """Decorate a training function so that it survives errors of the job; its first argument is a State.

    Before each attempt the state is synchronised from rank 0. After a HorovodInternalError (a mismatch between ranks, a
    stall, a shutdown by another rank, a lost rank) every rank goes back to a commit that all have, hvlike is started
    anew, reset callbacks are called, and func is called again. A HostsUpdatedInterrupt does the same without going
    back, and without synchronising if it says so on all ranks. Other exceptions pass through; where a lost rank does
    not end the job, one that nobody catches on a single rank ends only that rank.

    A lost rank ends the job, unless it was started by `mpirun --with-ft ulfm` (Open MPI 5). Then the others go on:
    HVLIKE_SPARES of the last processes wait here, and take the numbers of lost ranks; without a spare there is one rank
    less from then on. A spare that is not needed ends its program here, with status 0.
    Calls of the decorated function are collective: all ranks, after init(). They return when func has returned on all.

    Args:
        func: Trains from where its argument `state` says, calls `state.commit()` now and then, and returns the result.
        retries: How many errors in a row, without a commit or a lost rank between them, are answered by another
            attempt.

    Returns:
        The decorated function; without func, a decorator.

    Raises:
        HorovodInternalError: On every rank: too many failures, or fewer than HVLIKE_MIN_RANKS are left.
        UsageError: An argument is wrong.

    Example:
        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 90):
                train_one_epoch(state)
                state.commit()

    Source: horovod.torch.elastic.run.
    """
    if func is None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise UsageError(f"elastic.run: retries must be a whole number of at least 0, got {retries!r}.")
        return lambda function: _run_with(function, retries)
    if not callable(func):
        raise WrongTypeError(f"elastic.run decorates a function, got {type(func).__name__}.")
    return _run_with(func, retries)


def _run_with(func: Callable[..., Any], retries: int) -> Callable[..., Any]:
    train = kept(func)

    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(
                f"elastic.run: the first argument of {func.__name__}() must be an elastic state, got "
                f"{type(state).__name__}. Pass hvd.elastic.TorchState(model=model, optimizer=optimizer, ...)."
            )
        session = _Session(state, retries)
        reason: Exception | None = None
        try:
            if session.waits():
                reason = RestartError("a rank was lost, and this process takes part from now on")
            while True:
                reason, result = session.attempt(reason, lambda: train(state, *args, **kwargs))
                if reason is None:
                    return ended(result)
        finally:
            session.end()

    return wrapper


class _Session:
    """One call of a decorated function on this process."""

    def __init__(self, state: State, retries: int) -> None:
        if not context.is_running():
            raise NotInitializedError(
                "hvlike: Horovod has not been initialized; use hvd.init(). Call it before elastic.run."
            )
        self._state = state
        self._retries = retries
        self._failures = 0
        self._commits = state.commits
        self._agreed = False  # Whether this process has said in the job's communicator if it is done
        self._losses = 0
        self._gives_up = False
        self._times: dict[str, float] = {}
        self._cause = ""  # The error behind the last restart, as it was on a rank that has met it
        self._ranks_before = 0
        self._sets: Sequence[ProcessSet] = context.current().sets
        self._gradients = context.current().knobs.gradients
        self._job: Job | None = context.current().world.job
        context.current().membership.restarts = self._job is not None
        prepare(state)
        vendor, version = context.current().world.mpi.get_vendor()
        level, text = what_a_loss_does(os.environ, vendor, version, size())
        if text and rank() == 0:
            log_once(level, text)

    def end(self) -> None:
        if context.is_running():
            context.current().membership.restarts = False

    @property
    def _holds(self) -> bool:
        """Whether this process has a commit."""
        return self._job is None or self._job.holds

    def waits(self) -> bool:
        """For a spare: block until this process is to take part in a restart. False for a rank that trains."""
        job = self._job
        if job is None or not job.waits:
            return False
        if job.agree(True, _perform) and not job.only_spares:
            # Python's own way to end: the exit handlers run.
            sys.exit(0)
        self._agreed = True
        return True

    def attempt(self, reason: Exception | None, train: Callable[[], Any]) -> tuple[Exception | None, Any]:
        """Train, after a restart if there is a reason for one. Returns the reason for the next one, or the result."""
        try:
            skip_sync = reason is not None and self.start_again(reason)
            if not skip_sync:
                self._state.sync()
            if reason is not None:
                self._check_size(reason)
                self.report(reason)
            result = self._run(train)
            self.finish()
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            self.noticed(error)
            return error, None
        return None, result

    def _run(self, train: Callable[[], Any]) -> Any:
        try:
            return train()
        except (HorovodInternalError, HostsUpdatedInterrupt):
            raise
        except BaseException:
            if self._job is not None:
                self._job.goes_on_without_this = True
            raise

    def noticed(self, error: Exception) -> None:
        """An attempt has ended with an error. Raises: it, once this session gives up."""
        if self._gives_up:
            raise error
        self._times = {"noticed": system.monotonic()}
        if isinstance(error, HorovodInternalError):
            self._failures = 1 if self._state.commits > self._commits else self._failures + 1

    def start_again(self, reason: Exception) -> bool:
        """Start hvlike anew and go back to a commit that all have. Returns whether all can do without sync().

        Collective over the ranks that are left; blocks. Raises: HorovodInternalError, where another one is lost
        meanwhile or the ranks give up.
        """
        state = self._state
        self._restart()
        while self._job is not None and self._job.waits:
            # There are ranks enough without this one.
            self.waits()
            self._restart()
        skip_sync = isinstance(reason, HostsUpdatedInterrupt) and reason.skip_sync
        goes_back = not isinstance(reason, HostsUpdatedInterrupt)
        held = state.held_commits() if self._holds else None
        text = f"{type(reason).__name__}: {reason}"
        met = None if isinstance(reason, RestartError) else text
        answers = allgather_object((self._failures, skip_sync, goes_back, held, met), name="elastic.agree")
        self._cause = next((met for *_, met in answers if met), text)
        self._check(max(failures for failures, *_ in answers), reason)
        commits = [held for _, _, _, held, _ in answers if held is not None]
        if any(back for _, _, back, _, _ in answers) and (self._holds or not commits):
            # Spares that are left alone: the ranks may have been lost while these took over their state.
            common = set(commits[0]).intersection(*commits) if commits else set()
            state.restore_commit(max(common, default=None))
        self._commits = state.commits
        state.on_reset()
        return all(skip for _, skip, *_ in answers) and len(commits) == len(answers)

    def _restart(self) -> None:
        """Start hvlike anew: with the same ranks and process sets, or with those that are left. Collective; blocks."""
        if self._job is None:
            _restart_all()
            return
        if context.is_running():
            self._sets = context.current().sets
            self._ranks_before = context.current().place.size
            context.end_context(Ending.RESTART)
        if not self._agreed:
            self._job.agree(False)
        self._agreed = False
        self._times["agreed"] = system.monotonic()
        context.start_context(self._job, self._sets, self._gradients)
        context.current().membership.restarts = True
        self._times["rebuilt"] = system.monotonic()
        if self._job.losses > self._losses:
            self._losses, self._failures = self._job.losses, 0

    def _check(self, failures: int, reason: Exception) -> None:
        """Raise on all ranks if they give up."""
        if failures > self._retries:
            self._gives_up = True
            raise HorovodInternalError(
                f"elastic.run gives up: {failures} failures in a row without a commit between them, {self._retries} "
                f"are allowed (@hvd.elastic.run(retries=...)). The last one on this rank: {type(reason).__name__}: "
                f"{reason}"
            ) from reason

    def _check_size(self, reason: Exception) -> None:
        """Raise on all ranks if too few are left, after a durable commit of what they have."""
        least = context.current().knobs.min_ranks
        if size() < least:
            self._gives_up = True
            # Spares that are left alone have no commit.
            if self._state.durable is not None and self._state.commits:
                self._state.durable.write()
            raise HorovodInternalError(
                f"elastic.run gives up: {size()} of {self._ranks_before} ranks {'is' if size() == 1 else 'are'} left, "
                f"and HVLIKE_MIN_RANKS={least}. {self._cause}"
            ) from reason

    def report(self, reason: Exception) -> None:
        """Say what happened, once training can go on."""
        if self._job is not None:
            self._job.holds = True
        if self._job is None or not self._ranks_before:
            logger.warning("rank %d: elastic.run has started again after %s: %s", rank(), type(reason).__name__, reason)
            return
        now, times = system.monotonic(), self._times
        began = times.get("noticed", times["agreed"])
        recorder = context.current().fabric.recorder
        if recorder.on:
            recorder.instant(recorder.row("elastic"), "RECOVERED", {"reason": self._cause, "seconds": now - began})
        if rank() == 0:
            logger.warning(
                "elastic.run goes on with %d of %d ranks and %d spares from commit %d, %.3f s after it was noticed "
                "(agreed %.3f, rebuilt %.3f, restored %.3f). %s",
                size(),
                self._ranks_before,
                len(self._job.spares),
                self._state.commits,
                now - began,
                times["agreed"] - began,
                times["rebuilt"] - times["agreed"],
                now - times["rebuilt"],
                self._cause,
            )

    def finish(self) -> None:
        """Wait until func has returned on all ranks. Raises: HorovodInternalError on all of them if it has not."""
        if not is_initialized():
            if self._job is None:
                return
            raise ShutdownError("The function of elastic.run has called hvd.shutdown(). Call it after elastic.run.")
        barrier()
        if self._job is not None:
            self._agreed = True
            if not self._job.agree(True, _perform):
                raise RestartError("Another rank has met an error, and starts again from the last commit.")
            self._agreed = False
            self._job.release_spares(context.current().world.comm)


def _perform(action: Callable[[], None]) -> None:
    context.current().fabric.loop.perform(action)


def _restart_all() -> None:
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


def what_a_loss_does(environ: Mapping[str, str], vendor: str, version: Sequence[int], size: int) -> tuple[int, str]:
    """Return a sentence where a lost rank may end the job and nothing starts it again, else "", and a level of the log:
    a job that goes well is not warned. Vendor and version are those of the MPI library.
    """
    if size == 1 or exit_status.VARIABLE in environ:
        return logging.INFO, ""
    if fault_tolerance.is_enabled(environ):
        defect = fault_tolerance.known_defect(version)
        return logging.WARNING, defect and f"elastic.run: {defect}. {fault_tolerance.REMEDY}"
    goes_on = "go on without it under `mpirun --with-ft ulfm`, and " if family_of_library(vendor) == OPEN_MPI else ""
    return logging.INFO, (
        "elastic.run: an error is answered by going back to the last commit, but a lost rank ends this job. The "
        f"others {goes_on}start again under `python -m hvlike launch` ({page('elastic')})."
    )


@cache
def log_once(level: int, text: str) -> None:
    logger.log(level, "%s", text)
