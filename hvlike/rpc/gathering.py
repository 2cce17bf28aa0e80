"""Helpers of torch's higher layers: gather objects, meet, wait for all calls of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hvlike.errors import RpcError
from hvlike.rpc.agent import current
from hvlike.rpc.calls import gather_futures, rpc_sync
from hvlike.rpc.constants import UNSET_RPC_TIMEOUT
from hvlike.rpc.functions import async_execution

_Key = tuple[int, tuple[str, ...], int]


class _Meeting:
    """What the leader of one gathering has so far."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.futures: list[torch.futures.Future[dict[str, Any]]] = []


class _Meetings:
    lock = threading.Lock()
    open: ClassVar[dict[_Key, _Meeting]] = {}
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
    agent = current()
    names = tuple(sorted(set(worker_names or [worker.name for worker in agent.workers])))
    leader = agent.worker(names[0])
    if agent.me.name not in names:
        raise RpcError(f"_all_gather: {agent.me.name} called it with {list(names)}, a list without itself.")
    with _Meetings.lock:
        number = _Meetings.numbers[agent.session, names] = _Meetings.numbers.get((agent.session, names), 0) + 1
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
    with _Meetings.lock:
        for old in [each for each in _Meetings.open if each[0] < key[0]]:
            # Somebody did not come before its session was over.
            del _Meetings.open[old]
        meeting = _Meetings.open.setdefault(key, _Meeting())
        meeting.objects[name] = obj
        meeting.futures.append(future)
        complete = len(meeting.objects) == len(key[1])
        if complete:
            del _Meetings.open[key]
    if complete:
        for each in meeting.futures:
            each.set_result(meeting.objects)
    return future
