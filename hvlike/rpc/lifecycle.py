"""init_rpc and shutdown: the beginning and the end of an RPC session."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.session import context
from hvlike.collectives.session.context import Context
from hvlike.errors import HorovodInternalError, RpcError, UsageError, WorkerLostError
from hvlike.rpc.agent.agent import Agent, current_agent, is_running, set_agent
from hvlike.rpc.agent.calls import serve_calls
from hvlike.rpc.agent.options import RpcBackendOptions, checked_timeout, settle_options
from hvlike.rpc.agent.shutdown import KNOWN, REFERENCES, WORK
from hvlike.rpc.rrefs.session import begin_rrefs, checks_leaks, current_session, live_rrefs
from hvlike.rpc.wire.autograd_hooks import autograd_hooks
from hvlike.rpc.wire.devices import DeviceMaps, DeviceOffer, check_offers
from hvlike.rpc.wire.message import WorkerInfo
from hvlike.system.system import of_process, system
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library

logger = logging.getLogger("hvlike")

_REPORT_SECONDS = 60.0

ANSWER_SECONDS = 1.0  # How long a shutdown waits for the status of the other workers before it reports


class _Sessions:
    running: Context
    """hvlike's context in which the last session began; it is not the current one any more while hvlike ends."""
    hear: Callable[[Errors], None]
    """What hears there of ranks that leave."""

    def __init__(self) -> None:
        self.fabric: Fabric | None = None
        self.early: list[Any] = []  # Messages that have come over this fabric for sessions which have not begun here
        self.number = 0  # Number of the last session; the same on all workers


_sessions = of_process(_Sessions)


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    rpc_timeout: float | None = None,
    num_worker_threads: int | None = None,
) -> None:
    """Begin an RPC session among all ranks. Starts hvlike if it does not run yet.

    Collective: every rank calls it. Blocks until every worker can be called.

    Args:
        name: Name of this worker, different from all others.
        backend: torch's BackendType, or None. Messages go over MPI in any case.
        rank: Not needed; if given, it must be MPI's rank.
        world_size: Not needed; if given, it must be MPI's number of ranks.
        rpc_backend_options: The options; default: RpcBackendOptions().
        rpc_timeout: Seconds until a call without a timeout of its own fails, in place of the option; 0: never.
        num_worker_threads: How many functions run for callers at a time, in place of the option.

    Raises:
        RuntimeError: "... is already initialized" in a session; "... is not unique" on every rank if two workers have
            the same name.
        UsageError: (a ValueError) For wrong arguments; on every rank if one rank has them.

    Example:
        rpc.init_rpc(f"worker{hvd.rank()}")

    Source: torch.distributed.rpc.init_rpc.
    """
    mpi_library.check_not_forked()
    if is_running():
        raise RpcError(f"RPC is already initialized: worker {current_agent().me.name} runs. Call shutdown() first.")
    options, wrong = _settle(name, backend, rpc_backend_options, num_worker_threads, rpc_timeout)
    context.start_context(None, [])
    running = context.current()
    here, size = running.world.rank, running.world.size
    if not wrong and rank not in (None, here):
        wrong = f"init_rpc: rank={rank} was given on MPI's rank {here}; leave it out, mpirun numbers the ranks."
    elif not wrong and world_size not in (None, size):
        wrong = f"init_rpc: world_size={world_size} was given, but mpirun has started {size} ranks; leave it out."
    answers = allgather_object((wrong, name, _sessions.number, options.offer()), name="hvlike.rpc.init_rpc")
    _check_answers(answers, here)
    _sessions.number = max(number for _, _, number, _ in answers) + 1
    if _sessions.fabric is not running.fabric:
        _sessions.fabric, _sessions.early = running.fabric, []
    workers = tuple(WorkerInfo(each, number) for number, (_, each, *_) in enumerate(answers))
    devices = DeviceMaps(here, [each.name for each in workers], [each[3] for each in answers], options.devices)
    agent = Agent(running.fabric, _sessions.early, _sessions.number, workers, options, devices)
    serve_calls(agent)
    begin_rrefs(agent)
    autograd_hooks().begin(agent)
    set_agent(agent)
    _sessions.running = running
    running.before_close.append(_end_with_hvlike)
    _sessions.hear = partial(_lose, agent)
    running.departures.listen(_sessions.hear)
    agent.begin()


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the RPC session on this worker. init_rpc may follow.

    Args:
        graceful: True: block until all workers have called it and all work is done, including the work of others and
            work that it causes; this worker serves meanwhile. Then its RRefs of values on other workers end, even if
            Python still holds them. False: end at once; calls of others to this worker fail.
        timeout: Seconds to wait; 0: no limit. The log says every minute what is missing.

    Raises:
        WorkerLostError: (a RuntimeError) graceful, and a worker has vanished of whose loss no call has told this
            worker. The session goes on: call it again to wait for the other workers only.
        RuntimeError: Outside of a session. When the time is over: says which worker still does what; the session has
            ended on this worker then.

    Source: torch.distributed.rpc.shutdown.
    """
    agent = current_agent()
    limit = checked_timeout("shutdown: timeout", timeout)
    deadline = system.monotonic() + limit if limit else None
    if not graceful:
        _end(agent, tell=True)
        return
    try:
        _wait_until_quiet(agent, WORK, deadline)
        session = current_session()
        # Takes away all RRefs of other workers' values, held or not, and tells their owners.
        session.perform(session.lifetime.drop_all)
        _wait_until_quiet(agent, REFERENCES, deadline)
        if _sessions.running.world.job is not None:
            _wait_until_known(agent, deadline)
        leaked = [str(each) for each in live_rrefs()] if checks_leaks() else []
    except WorkerLostError:
        raise
    except BaseException:
        _end(agent, tell=True)
        raise
    _end(agent, tell=False)
    if leaked:
        raise RpcError(
            f"Leaking RRefs on {agent.me.name} (rank {agent.rank}): {'; '.join(leaked)}. They were still in use when "
            "RPC was shut down."
        )


def _settle(
    name: str, backend: Any, options: Any, threads: int | None, timeout: float | None
) -> tuple[RpcBackendOptions, str]:
    """Return the options, or what is wrong on this rank: all ranks learn it, so that none waits for this one."""
    try:
        if not isinstance(name, str) or not name:
            raise UsageError(f"init_rpc: name must be a str that is not empty, got {name!r}.")
        return settle_options(backend, options, threads, timeout), ""
    except UsageError as error:
        return RpcBackendOptions(), str(error)


def _check_answers(answers: list[tuple[str, str, int, DeviceOffer]], rank: int) -> None:
    wrong = {each: text for each, (text, *_) in enumerate(answers) if text}
    if wrong:
        if rank in wrong:
            raise UsageError(wrong[rank])
        raise HorovodInternalError("; ".join(f"rank {each}: {text}" for each, text in wrong.items()))
    names = [name for _, name, *_ in answers]
    for name, holding in Counter(names).items():
        if holding > 1:
            holders = [each for each, other in enumerate(names) if other == name]
            raise RpcError(f"RPC worker name {name} is not unique: the ranks {holders} have it. Name each its own.")
    unfit = check_offers(names, [offer for *_, offer in answers])
    if unfit:
        raise UsageError(f"init_rpc: device maps that cannot be: {unfit}.")


def _wait_until_quiet(agent: Agent, phase: str, deadline: float | None) -> None:
    # The pool threads drive the loop meanwhile: requests that come in are for them to run.
    agent.shutdown.begin(phase)
    while True:
        remaining = None if deadline is None else max(0.0, deadline - system.monotonic())
        slice_ = _REPORT_SECONDS if remaining is None else min(remaining, _REPORT_SECONDS)
        if agent.shutdown.wait(slice_):
            return
        over = deadline is not None and system.monotonic() >= deadline
        if over or agent.rank == min(agent.present):
            report = (
                f"shutdown() of RPC on {agent.me.name} (rank {agent.rank}) waits for the other workers: "
                f"{agent.shutdown.report(ANSWER_SECONDS)}."
            )
            if over:
                raise RpcError(f"{report} The session has ended on this worker, its time limit was over.")
            logger.warning(report)


def _wait_until_known(agent: Agent, deadline: float | None) -> None:
    """The session is over, so a worker that leaves now is only one less to wait for."""
    while True:
        try:
            _wait_until_quiet(agent, KNOWN, deadline)
        except WorkerLostError:
            if len(agent.present) > 1:
                continue
        return


def _end(agent: Agent, *, tell: bool) -> None:
    running = _sessions.running
    running.before_close.remove(_end_with_hvlike)
    running.departures.ignore(_sessions.hear)
    agent.end(f"RPC has been shut down on {agent.me.name} (rank {agent.rank}) while this was in flight.", tell=tell)
    current_session().end()
    autograd_hooks().end()
    set_agent(None)


def _end_with_hvlike() -> None:
    """hvlike is shut down, or the program ends, during a session."""
    _end(current_agent(), tell=True)


def _lose(agent: Agent, errors: Errors) -> None:
    names = {rank: f"{agent.workers[rank].name} (rank {rank})" for rank in errors}
    texts = {rank: f"{names[rank]} cannot be reached by RPC any more: {error}" for rank, error in errors.items()}
    agent.lose(texts, vanished=True)
