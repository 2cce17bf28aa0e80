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
lost ranks (hvlike/transport/failure/fault_tolerance.py). A Recovery goes from the error to TRAINING (recovery.py).

An error need not reach all ranks. Those that meet it shut hvlike down, or revoke its communicators; whatever the others
wait for then fails, which brings them here too. At the end all agree that all have returned: each process says once for
each communicator of the job whether it is done (`Job.agree_on_end`), a spare when it begins to wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, overload

from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.session import context
from hvlike.collectives.session.basics import is_initialized, rank, size
from hvlike.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NotInitializedError,
    RestartError,
    ShutdownError,
    UsageError,
    WrongTypeError,
)
from hvlike.training.elastic.durable import ended, kept, prepare
from hvlike.training.elastic.recovery import History, Recovery, perform, wait_as_spare
from hvlike.training.elastic.state import State
from hvlike.transport.failure import exit_status, fault_tolerance
from hvlike.transport.failure.fault_tolerance import Job
from hvlike.transport.host.find_mpirun import family_of_library
from hvlike.transport.host.launcher_table import OPEN_MPI
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
        try:
            recovery = session.stand_by()
            while True:
                recovery, result = session.attempt(recovery, lambda: train(state, *args, **kwargs))
                if recovery is None:
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
        running = context.current()
        self._state = state
        self._history = History(retries, state.commits)
        self._job: Job | None = running.world.job
        running.membership.restarts = self._job is not None
        prepare(state)
        vendor, version = running.world.mpi.get_vendor()
        level, text = what_a_loss_does(os.environ, vendor, version, size())
        if text and rank() == 0:
            log_once(level, text)

    def end(self) -> None:
        if context.is_running():
            context.current().membership.restarts = False

    def stand_by(self) -> Recovery | None:
        """On a spare, block until this process is to take part in a restart, and return that; else None."""
        if self._job is None or not self._job.waits:
            return None
        wait_as_spare(self._job)
        reason = RestartError("a rank was lost, and this process takes part from now on")
        return Recovery(reason, self._state, self._job, self._history)

    def attempt(self, recovery: Recovery | None, train: Callable[[], Any]) -> tuple[Recovery | None, Any]:
        """Train, after a recovery if there is one. Return the next recovery, or the result."""
        try:
            if recovery is None:
                self._state.sync()
            else:
                recovery.run()
            result = self._run(train)
            self.finish()
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            if recovery is not None and recovery.gives_up:
                raise
            if isinstance(error, HorovodInternalError):
                self._history.failed(self._state.commits)
            return Recovery(error, self._state, self._job, self._history), None
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

    def finish(self) -> None:
        """Wait until func has returned on all ranks. Raises: HorovodInternalError on all of them if it has not."""
        if not is_initialized():
            if self._job is None:
                return
            raise ShutdownError("The function of elastic.run has called hvd.shutdown(). Call it after elastic.run.")
        barrier()
        if self._job is not None:
            if not self._job.agree_on_end(True, perform):
                raise RestartError("Another rank has met an error, and starts again from the last commit.")
            self._job.release_spares(context.current().world.comm)


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
