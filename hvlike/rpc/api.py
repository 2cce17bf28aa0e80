"""The names that programs take from `torch.distributed.rpc.api`; here are its small functions.

Queries (worker names, timeouts, statistics) and what torch's higher layers use: _all_gather, _barrier, _wait_all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvlike.errors import RpcError, WorkerLostError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.agent import current_agent as _get_current_rpc_agent
from hvlike.rpc.agent.agent import is_running as _is_current_rpc_agent_set
from hvlike.rpc.agent.calls import rpc_async, rpc_sync
from hvlike.rpc.agent.calls import wait_all as _wait_all
from hvlike.rpc.agent.futures import async_execution
from hvlike.rpc.agent.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, checked_timeout
from hvlike.rpc.lifecycle import init_rpc, shutdown
from hvlike.rpc.rrefs.rref import RRef, remote
from hvlike.rpc.rrefs.session import LiveRRef, current_session, live_rrefs
from hvlike.rpc.rrefs.session import set_leak_checking as _set_leak_checking
from hvlike.rpc.wire.message import WorkerInfo
from hvlike.system.system import of_process, system

__all__ = [
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "RRef",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_set_leak_checking",
    "_set_rpc_timeout",
    "_wait_all",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_Key = tuple[int, tuple[str, ...], int]  # Session, names of the workers, and how often these workers have gathered


_Round = tuple[dict[str, Any], list[torch.futures.Future[Any]]]
"""The objects that the leader of one _all_gather has so far, and the futures of who gave them."""


class _Gatherings:
    def __init__(self) -> None:
        self.lock = system.Lock()
        self.rounds: dict[_Key, _Round] = {}
        self.numbers: Counter[tuple[int, tuple[str, ...]]] = Counter()
        self.watched = 0  # The last session whose losses end rounds


_gatherings = of_process(_Gatherings)


def _all_gather(
    obj: Any, worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gather an object of every worker. Blocks until all have called it.

    Args:
        obj: This worker's object, picklable.
        worker_names: The workers that take part, this one included, all in the same order of calls. Default: all.
        timeout: Seconds; 0: no limit; default: that of init_rpc.

    Returns:
        The objects, by worker name.

    Raises:
        WorkerLostError: (a RuntimeError) One of the workers is gone.
        RuntimeError: For an unknown name, for a list without this worker, and when the time is over.

    Source: torch.distributed.rpc._all_gather.
    """
    agent = current_agent()
    names = tuple(sorted(set(worker_names or [worker.name for worker in agent.workers])))
    leader = agent.worker(names[0])
    if agent.me.name not in names:
        raise RpcError(f"_all_gather: {agent.me.name} called it with {list(names)}, a list without itself.")
    with _gatherings.lock:
        numbers = _gatherings.numbers
        numbers[agent.session, names] += 1
        key = agent.session, names, numbers[agent.session, names]
    gathered: dict[str, Any] = rpc_sync(leader, _contribute, (key, agent.me.name, obj), timeout=timeout)
    return gathered


def _barrier(worker_names: Sequence[str] | None = None) -> None:
    """Block until all workers have called it.

    Args:
        worker_names: The workers that take part, this one included. Default: all.

    Source: torch.distributed.rpc.api._barrier.
    """
    _all_gather(None, worker_names)


@async_execution
def _contribute(key: _Key, name: str, obj: Any) -> torch.futures.Future[dict[str, Any]]:
    """On the leader: take the object of one worker. Answered when all objects are there."""
    future: torch.futures.Future[dict[str, Any]] = torch.futures.Future()
    agent = current_agent()
    with _gatherings.lock:
        if _gatherings.watched != agent.session:
            _gatherings.watched = agent.session
            agent.when_lost.append(partial(_end_rounds, agent))
        for rank, reason in agent.lost.items():
            if agent.workers[rank].name in key[1]:
                raise WorkerLostError(reason, [rank])
        rounds = _gatherings.rounds
        for old in [each for each in rounds if each[0] < key[0]]:
            # A worker did not come before its session was over.
            del rounds[old]
        objects, futures = rounds.setdefault(key, ({}, []))
        objects[name] = obj
        futures.append(future)
        complete = len(objects) == len(key[1])
        if complete:
            del rounds[key]
    for each in futures if complete else ():
        each.set_result(objects)
    return future


def _end_rounds(agent: Agent, rank: int, error: Exception) -> None:
    """On the leader: a worker is gone, and will not give its object. In the loop, perhaps as the session ends."""
    name = agent.workers[rank].name
    with _gatherings.lock:
        rounds = _gatherings.rounds
        ended = [rounds.pop(key) for key in list(rounds) if key[0] == agent.session and name in key[1]]
    for _, futures in ended:
        for each in futures:
            agent.submit(partial(each.set_exception, error))


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the name and rank of a worker. Local.

    Args:
        worker_name: Name, rank or WorkerInfo. Default: this worker.

    Returns:
        Its WorkerInfo.

    Raises:
        RuntimeError: Outside of a session, and for an unknown worker.

    Source: torch.distributed.rpc.get_worker_info.
    """
    agent = current_agent()
    return agent.me if worker_name is None else agent.worker(worker_name)


def get_rpc_timeout() -> float:
    """Return the time limit of calls without a timeout of their own, in seconds; 0: no limit. Local.

    Raises:
        RuntimeError: Outside of a session.

    Source: torch.distributed.rpc.get_rpc_timeout.
    """
    return current_agent().timeout


def _set_rpc_timeout(rpc_timeout: float) -> None:
    """Set the time limit of the calls that this worker makes from now on without a timeout of their own. Local.

    Args:
        rpc_timeout: Seconds; 0: no limit.

    Raises:
        RuntimeError: Outside of a session.
        UsageError: (a ValueError) For anything but a number of seconds.

    Source: torch.distributed.rpc._set_rpc_timeout.
    """
    current_agent().timeout = checked_timeout("_set_rpc_timeout", rpc_timeout)


def _get_debug_info() -> dict[str, str]:
    """Return counts of this worker under torch's names. Local.

    Raises:
        RuntimeError: Outside of a session.
    """
    agent = current_agent()
    return {
        "agent.num_pending_requests": str(len(agent.pending)),
        "agent.thread_pool_size": str(agent.options.num_worker_threads),
        "agent.num_idle_threads": str(max(0, agent.options.num_worker_threads - agent.fabric.loop.thread_pool.running)),
        **current_session().debug_info(),
    }


@dataclass(frozen=True)
class Statistics:
    """What RPC is doing on one worker, at one moment."""

    worker: str
    """The worker's name."""
    calls_in_flight: dict[str, int]
    """This worker's calls without a reply, by the name of the worker that serves them."""
    requests_queued: int
    """Requests of others that wait for a thread."""
    requests_running: int
    """Functions that run for others now."""
    requests_open: int
    """Requests of others without a reply: queued, running, and those whose function answers later."""
    threads: int
    """Threads of RPC and of the progress loop, idle ones included."""
    messages_sent: int
    """Messages of calls and notices, since init_rpc."""
    messages_received: int
    """Messages of calls and notices, since init_rpc."""
    live_rrefs: tuple[LiveRRef, ...]
    """The values that this worker keeps for RRefs, with their creators and holders."""


def statistics() -> Statistics:
    """Return what RPC is doing on this worker now. Local, does not block.

    Raises:
        RuntimeError: Outside of a session.
    """
    agent = current_agent()
    thread_pool = agent.fabric.loop.thread_pool
    return Statistics(
        worker=agent.me.name,
        calls_in_flight={agent.workers[rank].name: calls for rank, calls in sorted(agent.pending.ranks().items())},
        requests_queued=thread_pool.queued,
        requests_running=thread_pool.running,
        requests_open=len(agent.open),
        threads=thread_pool.size,
        messages_sent=sum(agent.sent),
        messages_received=sum(agent.received),
        live_rrefs=tuple(live_rrefs()),
    )
