"""elastic.run: call a training function until it ends well, going back to the last commit after an error of the job.

                 sync()          func(state)        all have returned
    start -----> IN STEP -----> TRAINING ---------> barrier ---------> result
                   ^               |
                   |  on_reset()   | HorovodInternalError: restore();  HostsUpdatedInterrupt: keep the state
                   +--- RESTART <--+
                        shutdown(), init(), the ranks agree whether to try again and whether to sync()

An error need not reach all ranks. Those that meet it shut hvlike down; whatever the others ask for next then fails
with ShutdownError, which brings them here too. The barrier holds those that have nothing more to ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, overload

import torch

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.requests.process_set import registered_sets
from hvlike.collectives.requests.reduction import Max
from hvlike.collectives.session import context
from hvlike.collectives.session.basics import init, is_initialized, rank, shutdown
from hvlike.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError, UsageError
from hvlike.training.elastic.state import State


def restart() -> None:
    """Start hvlike anew, whatever was in flight, with the same ranks and process sets. Collective; blocks."""
    if not context.is_running():
        raise NotInitializedError("Horovod has not been initialized; use hvd.init(). Call it before elastic.run.")
    world, sets, gradients = context.current().world, registered_sets(), context.current().knobs.gradients
    # The ranks may be some of the job's only: init(comm=...) was called with a list or a communicator.
    members, everybody = world.comm.Get_group(), world.mpi.COMM_WORLD.Get_group()
    try:
        ranks = list(world.mpi.Group.Translate_ranks(members, list(range(world.size)), everybody))
    finally:
        members.Free()
        everybody.Free()
    shutdown()
    init(ranks, process_sets=sets, gradients=gradients)


logger = logging.getLogger("hvlike")

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def run(func: Function) -> Function: ...


@overload
def run(*, retries: int = 3) -> Callable[[Function], Function]: ...


def run(func: Any = None, *, retries: int = 3) -> Any:
    """Decorate a training function so that it survives errors of the job; its first argument is a State.

    Before each attempt the state is synchronised from rank 0. After a HorovodInternalError (a mismatch between ranks, a
    stall, a shutdown by another rank) every rank goes back to its last commit, hvlike is started anew with the same
    ranks and process sets, reset callbacks are called, and func is called again. A HostsUpdatedInterrupt does the same
    without going back, and without synchronising if it says so on all ranks. Other exceptions pass through. A rank that
    has ended is not replaced.
    Calls of the decorated function are collective: all ranks, after init(). They return when func has returned on all.

    Args:
        func: Trains from where its argument `state` says, calls `state.commit()` now and then, and returns the result.
        retries: How many failures in a row, without a commit between them, are answered by another attempt.

    Returns:
        The decorated function; without func, a decorator.

    Raises:
        HorovodInternalError: On every rank: too many failures.
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
        raise UsageError(f"elastic.run decorates a function, got {type(func).__name__}.")
    return _run_with(func, retries)


def _run_with(func: Callable[..., Any], retries: int) -> Callable[..., Any]:
    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(
                f"elastic.run: the first argument of {func.__name__}() must be an elastic state, got "
                f"{type(state).__name__}. Pass hvd.elastic.TorchState(model=model, optimizer=optimizer, ...)."
            )
        failures, commits, skip_sync = 0, state.commits, False
        while True:
            reason: Exception
            try:
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
                if is_initialized():
                    barrier()
                return result
            except HorovodInternalError as error:
                failures = 1 if state.commits > commits else failures + 1
                reason, skip_sync = error, False
                state.restore()
            except HostsUpdatedInterrupt as interrupt:
                reason, skip_sync = interrupt, interrupt.skip_sync
            commits = state.commits
            restart()
            logger.warning("rank %d: elastic.run has started again after %s: %s", rank(), type(reason).__name__, reason)
            skip_sync = _agree(failures, skip_sync, retries, reason)
            state.on_reset()

    return wrapper


def _agree(failures: int, skip_sync: bool, retries: int, reason: Exception) -> bool:
    """Return whether all ranks can do without sync(). Collective, the first operation after the restart."""
    answers = torch.tensor([failures, int(not skip_sync)], device="cpu")
    most, has_to_sync = allreduce(answers, name="elastic.agree", op=Max).tolist()
    if most > retries:
        raise HorovodInternalError(
            f"elastic.run gives up: {most} failures in a row without a commit between them, {retries} are allowed "
            f"(@hvd.elastic.run(retries=...)). The last one on this rank: {type(reason).__name__}: {reason}"
        ) from reason
    return not has_to_sync
