"""init_rpc and shutdown: the beginning and the end of an RPC session."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.session import context
from hvlike.collectives.session.context import Context
from hvlike.errors import HorovodInternalError, RpcError, UsageError
from hvlike.rpc import rrefs
from hvlike.rpc.agent import agent as agents
from hvlike.rpc.agent import calls
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.options import RpcBackendOptions, checked_timeout, settle_options
from hvlike.rpc.agent.routing import SessionRouter
from hvlike.rpc.agent.shutdown import status_report, worker_status
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.devices import DeviceMaps, DeviceOffer, check_offers
from hvlike.rpc.wire.message import WorkerInfo
from hvlike.transport.fabric import Fabric
from hvlike.transport.host import mpi_library

logger = logging.getLogger("hvlike")

_REPORT_SECONDS = 60.0
_ANSWER_SECONDS = 1.0


class _Sessions:
    """What outlives a session."""

    fabric: Fabric | None = None
    switchboard: SessionRouter
    number = 0
    """Of the last session; the same on all workers."""
    running: Context
    """hvlike's, in which the last session has begun; it is not the current one any more when hvlike ends."""


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
    """Begin a session of RPC among all ranks; starts hvlike where it does not run yet.

    name: of this worker, unlike all others. backend: torch's, not needed. rank, world_size: need not be given; if they
    are, they must be MPI's. rpc_timeout, num_worker_threads: instead of those of rpc_backend_options.
    Collective: every rank calls it. Blocks until every worker can be called.
    Raises: RuntimeError "... is already initialized" in a session; RuntimeError "... is not unique" on every rank when
        two have the same name; UsageError (a ValueError) for wrong arguments, on every rank when one has them.
    Source: torch.distributed.rpc.init_rpc.
    """
    mpi_library.check_not_forked()
    if agents.is_running():
        raise RpcError(f"RPC is already initialized: worker {current_agent().me.name} runs. Call shutdown() first.")
    autograd_hooks.let_autograd_in()
    options, wrong = _settle(name, backend, rpc_backend_options, num_worker_threads, rpc_timeout)
    context.start_context(None, [])
    running = context.current()
    wrong = wrong or _wrong_place(running.world.rank, running.world.size, rank, world_size)
    answers = allgather_object((wrong, name, _Sessions.number, options.offer()), name="hvlike.rpc.init_rpc")
    _check_answers(answers, running.world.rank)
    _Sessions.number = max(number for _, _, number, _ in answers) + 1
    if _Sessions.fabric is not running.fabric:
        _Sessions.fabric, _Sessions.switchboard = running.fabric, SessionRouter(running.fabric)
    workers = tuple(WorkerInfo(each, number) for number, (_, each, *_) in enumerate(answers))
    devices = DeviceMaps(
        running.world.rank, [each.name for each in workers], [each[3] for each in answers], options.devices
    )
    agent = Agent(running.fabric, _Sessions.switchboard, _Sessions.number, workers, options, devices)
    calls.serve_calls(agent)
    rrefs.install(agent)
    autograd_hooks.autograd_hooks().begin(agent)
    agents.set_agent(agent)
    _Sessions.running = running
    running.before_close.append(_end_with_hvlike)
    running.when_lost.append(partial(_lose, agent))
    agent.begin()


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the session of RPC on this worker; init_rpc may follow.

    graceful: wait until all workers have called it and all work is done, that of others and work which it causes too;
        meanwhile this worker serves. Then its RRefs of values on other workers end, even where Python still holds them.
        False: end here and now; calls of others to this worker fail.
    timeout: seconds to wait; 0: as long as it takes. What is missing is reported in the log every minute.
    Raises: RuntimeError outside of a session; RuntimeError that says who still does what when the time is over (the
        session has then ended on this worker).
    Source: torch.distributed.rpc.shutdown.
    """
    agent = current_agent()
    limit = checked_timeout("shutdown: timeout", timeout)
    deadline = time.monotonic() + limit if limit else None
    if not graceful:
        _end(agent, tell=True)
        return
    agent.parting.begun = True
    try:
        _wait_until_quiet(agent, "work", deadline)
        rrefs.release_all()
        _wait_until_quiet(agent, "references", deadline)
        leaked = rrefs.leaked() if rrefs.checks_leaks() else []
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
    """The options, or what is wrong on this rank: all ranks are told of it, so that none waits for this one."""
    try:
        if not isinstance(name, str) or not name:
            raise UsageError(f"init_rpc: name must be a str that is not empty, got {name!r}.")
        return settle_options(backend, options, threads, timeout), ""
    except UsageError as error:
        return RpcBackendOptions(), str(error)


def _wrong_place(rank: int, size: int, given_rank: int | None, given_size: int | None) -> str:
    if given_rank is not None and given_rank != rank:
        return f"init_rpc: rank={given_rank} was given on MPI's rank {rank}; leave it out, mpirun numbers the ranks."
    if given_size is not None and given_size != size:
        return f"init_rpc: world_size={given_size} was given, but mpirun has started {size} ranks; leave it out."
    return ""


def _check_answers(answers: list[tuple[str, str, int, DeviceOffer]], rank: int) -> None:
    wrong = {each: text for each, (text, *_) in enumerate(answers) if text}
    if wrong:
        if rank in wrong:
            raise UsageError(wrong[rank])
        raise HorovodInternalError("; ".join(f"rank {each}: {text}" for each, text in wrong.items()))
    ranks: dict[str, list[int]] = {}
    for each, (_, name, *_) in enumerate(answers):
        ranks.setdefault(name, []).append(each)
    for name, holders in ranks.items():
        if len(holders) > 1:
            raise RpcError(f"RPC worker name {name} is not unique: the ranks {holders} have it. Name each its own.")
    unfit = check_offers([name for _, name, *_ in answers], [offer for *_, offer in answers])
    if unfit:
        raise UsageError(f"init_rpc: device maps that cannot be: {unfit}.")


def _wait_until_quiet(agent: Agent, phase: str, deadline: float | None) -> None:
    ended = threading.Event()
    # The background threads drive: what comes in meanwhile is for them to run.
    agent.parting.begin(phase, ended.set)
    while True:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        slice_ = _REPORT_SECONDS if remaining is None else min(remaining, _REPORT_SECONDS)
        if ended.wait(slice_):
            return
        over = deadline is not None and time.monotonic() >= deadline
        if over or agent.rank == min(agent.present):
            report = (
                f"shutdown() of RPC on {agent.me.name} (rank {agent.rank}) waits for the other workers: "
                f"{_who_is_missing(agent)}."
            )
            if over:
                raise RpcError(f"{report} The session has ended on this worker, its time limit was over.")
            logger.warning(report)


def _who_is_missing(agent: Agent) -> str:
    agent.parting.ask()
    # Who leaves meanwhile does not answer.
    agent.fabric.loop.wait(lambda: agent.present <= {agent.rank, *agent.parting.states}, _ANSWER_SECONDS)
    names = {rank: agent.workers[rank].name for rank in sorted(agent.present)}
    return status_report(names, {**agent.parting.states, agent.rank: worker_status(agent)})


def _end(agent: Agent, *, tell: bool) -> None:
    """Nothing of the session is left on this worker after this."""
    running = _Sessions.running
    running.before_close.remove(_end_with_hvlike)
    running.when_lost[:] = [each for each in running.when_lost if getattr(each, "args", ()) != (agent,)]
    agent.end(f"RPC has been shut down on {agent.me.name} (rank {agent.rank}) while this was in flight.", tell=tell)
    rrefs.uninstall()
    autograd_hooks.autograd_hooks().end()
    agents.set_agent(None)


def _end_with_hvlike() -> None:
    """hvlike is shut down, or the program ends, in the middle of a session."""
    _end(current_agent(), tell=True)


def _lose(agent: Agent, errors: dict[int, HorovodInternalError]) -> None:
    names = {rank: f"{agent.workers[rank].name} (rank {rank})" for rank in errors}
    agent.lose({rank: f"{names[rank]} cannot be reached by RPC any more: {error}" for rank, error in errors.items()})
