"""RPC calls as torch's profilers and the timeline show them, while one of them records.

In a profile a call is a range `rpc_<sync|async|remote>#<function>(<from> -> <to>)`: from the call until the answer is
here, for remote until the call returns. torch.profiler shows it on the calling worker; where it records all threads of
the serving worker, the function's run appears there too.

In the timeline a call has a row on both workers. The row of the serving worker shows QUEUE, until a thread is free and
the RRefs among the arguments are confirmed, then RUN, and for a function that answers later LATER.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent import remote_events
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.agent.remote_events import Collection
from hvlike.rpc.functions import async_execution, is_async
from hvlike.rpc.wire.devices import DeviceMaps
from hvlike.rpc.wire.message import Description, Packed, Request, WorkerInfo
from hvlike.rpc.wire.reducers import describe_subject, function_name


class TimelineRows:
    """Rows "<title> 1", "<title> 2" and so on of one worker's timeline."""

    def __init__(self, recorder: Recorder, title: str) -> None:
        self.recorder = recorder
        self._title = title
        self._lock = threading.Lock()
        self._generation = -1
        self._free: list[int] = []
        self._rows = 0

    def enter(self) -> RowUse:
        """Take a row."""
        with self._lock:
            if self._generation != self.recorder.generation:
                self._generation, self._free, self._rows = self.recorder.generation, [], 0
            if self._free:
                number = heapq.heappop(self._free)
            else:
                self._rows += 1
                number = self._rows
            return RowUse(self, self.recorder, self.recorder.row(f"{self._title} {number}"), number, self._generation)

    def leave(self, number: int, generation: int) -> None:
        """Give a row back."""
        with self._lock:
            if generation == self._generation:
                heapq.heappush(self._free, number)


class RowUse:
    """Something that has a row for a while. Silent when another timeline is recorded than the one it began in."""

    def __init__(self, rows: TimelineRows, recorder: Recorder, row: int, number: int, generation: int) -> None:
        self._rows = rows
        self.recorder = recorder
        self._row = row
        self._number = number
        self._generation = generation

    def begin(self, name: str, arguments: dict[str, Any], at: int | None = None) -> None:
        """A phase begins."""
        if self._counts:
            self.recorder.begin(self._row, name, arguments, at)

    def end(self, arguments: dict[str, Any] | None = None, at: int | None = None) -> None:
        """The phase that began last ends."""
        if self._counts:
            self.recorder.end(self._row, arguments, at)

    def leave(self) -> None:
        """The row is free for something else."""
        self._rows.leave(self._number, self._generation)

    @property
    def _counts(self) -> bool:
        return self.recorder.on and self.recorder.generation == self._generation


T = TypeVar("T")

_autograd: Any = torch.autograd


def is_recorded(recorder: Recorder) -> bool:
    """Whether anybody wants to know of calls now."""
    return recorder.on or profiler._is_profiler_enabled or bool(_autograd._profiler_enabled())


def begin_profiling(agent: Agent) -> None:
    """Get ready on this worker: profiles tell by its rank what has run where."""
    remote_events.install(agent)
    rpc: Any = getattr(torch._C, "_distributed_rpc", None)
    if rpc is not None:
        rpc._set_profiler_node_id(agent.rank)


class ObservedCall:
    """A call from here, while it lasts."""

    def __init__(self, agent: Agent, form: str, to: object, func: Any) -> None:
        """form: sync, async or remote. Raises: as Agent.worker."""
        self._agent = agent
        self._began = time.time_ns() / 1000
        callee = agent.worker(to)
        name = function_name(func)
        self._key = f"rpc_{form}#{name}({agent.me.name} -> {callee.name})"
        self._profiles = profiler._is_profiler_enabled or bool(_autograd._profiler_enabled())
        self._collection: Collection | None = remote_events.collection() if remote_events.is_legacy() else None
        self._stay = _enter(agent.fabric.recorder, "rpc calls")
        if self._stay is not None:
            self._stay.begin(f"rpc_{form} {name}", {"function": name, "callee": callee.name, "rank": callee.id})

    def range(self) -> AbstractContextManager[Any]:
        """The range of the profilers."""
        return profiler.record_function(self._key) if self._profiles else nullcontext()

    def to_run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The function and the arguments to send; `result` gets what comes back."""
        if self._collection is None or not callable(func):
            return func, args, kwargs
        return *self._collection.call(self._key, func, args, kwargs), None

    def to_run_for_rref(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The same for a call whose result stays on the other worker."""
        if self._collection is None or not callable(func):
            return func, args, kwargs
        return *self._collection.call_for_rref(self._key, self._agent.rank, func, args, kwargs), None

    def result(self, value: Any) -> Any:
        """What the function has returned."""
        return value if self._collection is None else self._collection.take(self._key, value)

    def ended(self, error: BaseException | None = None) -> None:
        """The call is over. Called once."""
        if self._collection is not None:
            self._collection.call_ended(self._key, self._began, self._agent.rank)
        if self._stay is not None:
            self._stay.end({"error": type(error).__name__} if error is not None else None)
            self._stay.leave()


class ObservedPromise(Promise):
    """The promise of rpc_async, which ends its observation."""

    __slots__ = ("_call",)

    def __init__(self, call: ObservedCall, range_: Any, devices: DeviceMaps) -> None:
        """range_: what entering the call's range has given."""
        self._call = call
        # A range of kineto must not outlast its profile: when it ends in the next one, torch writes to freed memory.
        outlasts = range_ is not None and remote_events.is_legacy()
        super().__init__(range_._call_end_callbacks_on_future if outlasts else None, devices)

    def set_result(self, value: Any) -> None:
        """As Promise."""
        self._call.ended()
        super().set_result(self._call.result(value))

    def set_error(self, error: Exception) -> None:
        """As Promise."""
        self._call.ended(error)
        super().set_error(error)


def observed_sync(
    agent: Agent, call: Callable[..., Any], to: object, func: Any, args: Any, kwargs: Any, *more: Any
) -> Any:
    """call(agent, to, func, args, kwargs, *more), which returns the result, observed."""
    observed = ObservedCall(agent, "sync", to, func)
    try:
        with observed.range():
            value = observed.result(call(agent, to, *observed.to_run(func, args, kwargs), *more))
    except BaseException as error:
        observed.ended(error)
        raise
    observed.ended()
    return value


def observed_async(
    agent: Agent, call: Callable[..., Any], to: object, func: Any, args: Any, kwargs: Any, *more: Any
) -> torch.futures.Future[Any]:
    """call(agent, promise, to, func, args, kwargs, *more), which completes the promise later, observed."""
    observed = ObservedCall(agent, "async", to, func)
    with observed.range() as range_:
        promise = ObservedPromise(observed, range_, agent.devices)
        try:
            call(agent, promise, to, *observed.to_run(func, args, kwargs), *more)
        except Exception as error:
            promise.set_error(error)
            raise
    return promise.future


def observed_remote(
    agent: Agent, call: Callable[..., T], to: object, func: Any, args: Any, kwargs: Any, *more: Any
) -> T:
    """call(agent, to, func, args, kwargs, *more), which returns an RRef, observed."""
    observed = ObservedCall(agent, "remote", to, func)
    try:
        with observed.range():
            rref = call(agent, to, *observed.to_run_for_rref(func, args, kwargs), *more)
    except BaseException as error:
        observed.ended(error)
        raise
    observed.ended()
    return rref


class ObservedRequest(Request):
    """A request of another worker, until it is answered."""

    __slots__ = ("_stay",)

    def __init__(self, request: Request, stay: RowUse | None) -> None:
        super().__init__(request.source, request.number, request.kind, request.packed, request.came, request._respond)
        self.about = describe_subject(request.about)
        self._stay = stay

    def answer(self, packed: Packed) -> None:
        """As Request."""
        self._ended({"bytes": bytes_of(packed)})
        super().answer(packed)

    def fail(self, error: BaseException | Description) -> None:
        """As Request."""
        self._ended({"error": error.name if isinstance(error, Description) else type(error).__name__})
        super().fail(error)

    def _ended(self, arguments: dict[str, Any]) -> None:
        if self._stay is not None:
            self._stay.end(arguments)
            self._stay.leave()


def observed_request(agent: Agent, request: Request, func: Any, args: Any) -> tuple[Request, Any]:
    """The request and the function to serve instead, so that its waiting and its run are seen."""
    function = remote_events.function_of(func, args)
    name, caller = function_name(function), agent.workers[request.source]
    recorder = agent.fabric.recorder
    stay = _enter(recorder, "rpc serves")
    if stay is not None:
        said = {"function": name, "caller": caller.name, "rank": caller.id, "bytes": bytes_of(request.packed)}
        stay.begin("QUEUE", said, recorder.now - int(1e9 * (time.monotonic() - request.came)))

    def run(*args: Any, **kwargs: Any) -> Any:
        if stay is not None:
            stay.end()
            stay.begin("RUN", said)
        with _range_of_run(name, caller, agent.me):
            returned = func(*args, **kwargs)
        if stay is not None and is_async(func):
            stay.end()
            stay.begin("LATER", said)
        return returned

    return ObservedRequest(request, stay), async_execution(run) if is_async(func) else run


def bytes_of(packed: Packed) -> int:
    """Bytes of a message, without its header."""
    return len(packed.body) + sum(storage.numel() for storage in packed.storages)


def _enter(recorder: Recorder, title: str) -> RowUse | None:
    if not recorder.on:
        return None
    rows = _rows.get(title)
    if rows is None or rows.recorder is not recorder:
        rows = _rows[title] = TimelineRows(recorder, title)
    return rows.enter()


def _range_of_run(name: str, caller: WorkerInfo, me: WorkerInfo) -> AbstractContextManager[Any]:
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"rpc_run#{name}({caller.name} -> {me.name})")


_rows: dict[str, TimelineRows] = {}
