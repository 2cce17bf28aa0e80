"""The small functions of the public API, under the names of torch.distributed.rpc.api.

Queries (worker names, timeouts, statistics) and what torch's higher layers use: _all_gather, _barrier, _wait_all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvlike.errors import RpcError
from hvlike.rpc import rrefs
from hvlike.rpc.agent.agent import current_agent
from hvlike.rpc.agent.agent import current_agent as _get_current_rpc_agent
from hvlike.rpc.agent.agent import is_running as _is_current_rpc_agent_set
from hvlike.rpc.agent.calls import gather_futures, rpc_async, rpc_sync
from hvlike.rpc.agent.options import checked_timeout
from hvlike.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from hvlike.rpc.functions import async_execution
from hvlike.rpc.lifecycle import init_rpc, shutdown
from hvlike.rpc.rrefs import LiveRRef, remote
from hvlike.rpc.rrefs import set_leak_checking as _set_leak_checking
from hvlike.rpc.rrefs.rref import RRef
from hvlike.rpc.wire.message import WorkerInfo

_Key = tuple[int, tuple[str, ...], int]


class _Round:
    """What the leader of one gathering has so far."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.futures: list[torch.futures.Future[dict[str, Any]]] = []


class _Rounds:
    lock = threading.Lock()
    open: ClassVar[dict[_Key, _Round]] = {}
    numbers: ClassVar[dict[tuple[int, tuple[str, ...]], int]] = {}


def _all_gather(
    obj: Any, worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the objects of all workers, by name.

    worker_names: who takes part, this worker included; None: all. Every one of them calls it, in the same order of
    calls; blocks until all have. timeout: seconds, as for rpc_sync.
    Raises: RuntimeError for a name that is not there, for a list without this worker, and when the time is over.
    Source: torch.distributed.rpc._all_gather.
    """
    agent = current_agent()
    names = tuple(sorted(set(worker_names or [worker.name for worker in agent.workers])))
    leader = agent.worker(names[0])
    if agent.me.name not in names:
        raise RpcError(f"_all_gather: {agent.me.name} called it with {list(names)}, a list without itself.")
    with _Rounds.lock:
        number = _Rounds.numbers[agent.session, names] = _Rounds.numbers.get((agent.session, names), 0) + 1
    gathered: dict[str, Any] = rpc_sync(
        leader, _contribute, ((agent.session, names, number), agent.me.name, obj), timeout=timeout
    )
    return gathered


def _barrier(worker_names: Sequence[str] | None = None) -> None:
    """Return when every worker of the list has called it. Source: torch.distributed.rpc.api._barrier."""
    _all_gather(None, worker_names)


@contextmanager
def _wait_all() -> Iterator[None]:
    """Leave the block when all calls are done that this thread started in it with rpc_async.

    Raises: the error of the first call that failed. Source: torch.distributed.rpc.api._wait_all.
    """
    with gather_futures() as futures:
        yield
    torch.futures.wait_all(futures)


@async_execution
def _contribute(key: _Key, name: str, obj: Any) -> torch.futures.Future[dict[str, Any]]:
    """On the leader: one worker's part, answered when all parts are there."""
    future: torch.futures.Future[dict[str, Any]] = torch.futures.Future()
    with _Rounds.lock:
        for old in [each for each in _Rounds.open if each[0] < key[0]]:
            # Somebody did not come before its session was over.
            del _Rounds.open[old]
        meeting = _Rounds.open.setdefault(key, _Round())
        meeting.objects[name] = obj
        meeting.futures.append(future)
        complete = len(meeting.objects) == len(key[1])
        if complete:
            del _Rounds.open[key]
    if complete:
        for each in meeting.futures:
            each.set_result(meeting.objects)
    return future


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """The name and rank of a worker; of this one without an argument. Local.

    Raises: RuntimeError outside of a session and for a worker that is not there.
    Source: torch.distributed.rpc.get_worker_info.
    """
    agent = current_agent()
    return agent.me if worker_name is None else agent.worker(worker_name)


def get_rpc_timeout() -> float:
    """Seconds that a call may take which does not say itself; 0: any time. Local.

    Raises: RuntimeError outside of a session.
    Source: torch.distributed.rpc.get_rpc_timeout.
    """
    return current_agent().timeout


def _set_rpc_timeout(rpc_timeout: float) -> None:
    """Set that time for the calls that this worker makes from now on.

    Raises: RuntimeError outside of a session, UsageError (a ValueError) for anything but a number of seconds.
    Source: torch.distributed.rpc._set_rpc_timeout.
    """
    current_agent().timeout = checked_timeout("_set_rpc_timeout", rpc_timeout)


def _get_debug_info() -> dict[str, str]:
    """Counts of this worker under the names that torch programs read. Raises: RuntimeError outside of a session."""
    agent = current_agent()
    thread_pool = agent.fabric.loop.thread_pool
    return {
        "agent.num_pending_requests": str(len(agent.pending)),
        "agent.thread_pool_size": str(agent.options.num_worker_threads),
        "agent.num_idle_threads": str(max(0, agent.options.num_worker_threads - thread_pool.running)),
        **rrefs.debug_info(),
    }


@dataclass(frozen=True)
class Statistics:
    """Figures of one worker at one moment."""

    worker: str
    """Its name."""
    calls_in_flight: dict[str, int]
    """Calls of this worker without an answer, by the name of the worker that serves them."""
    requests_queued: int
    """Requests of others that wait for a thread."""
    requests_running: int
    """Functions that run for others now."""
    requests_open: int
    """Requests of others without an answer: queued, running, and those whose function answers later."""
    threads: int
    """Threads of RPC and of the progress loop, idle ones included."""
    messages_sent: int
    messages_received: int
    live_rrefs: tuple[LiveRRef, ...]
    """The values that this worker keeps for RRefs, with their creators and holders."""


def statistics() -> Statistics:
    """What RPC is doing on this worker now. Local, does not block.

    Raises: RuntimeError outside of a session.
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
        live_rrefs=tuple(rrefs.live()),
    )


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
