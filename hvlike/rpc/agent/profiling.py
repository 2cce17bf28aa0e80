"""RPC calls as torch's profilers and the timeline show them, while one of them records.

In a profile a call is a range `rpc_<sync|async|remote>#<function>(<from> -> <to>)`: from the call until the reply is
here, for remote until the call returns. torch.profiler shows it on the calling worker; if it records all threads of the
serving worker, the function's run appears there too.

In the timeline a call has a row on both workers. The row of the serving worker shows QUEUE, until a thread is free and
the RRefs among the arguments are confirmed, then RUN, and for a function that answers later LATER.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.futures import Promise, async_execution, is_async
from hvlike.rpc.wire.devices import DeviceMaps
from hvlike.rpc.wire.message import Description, Packed, Request, WorkerInfo
from hvlike.rpc.wire.reducers import describe_subject, function_name

_autograd: Any = torch.autograd


class TimelineRows:
    """Rows "<title> 1", "<title> 2" ... of this worker's timeline, for things that overlap: each gets a free row."""

    def __init__(self, recorder: Recorder, title: str) -> None:
        self.recorder = recorder
        self._title = title
        self._lock = threading.Lock()
        self._generation = -1
        self._free: list[int] = []
        self._rows = 0

    def enter(self) -> RowUse:
        """Take the first free row."""
        with self._lock:
            if self._generation != self.recorder.generation:
                self._generation, self._free, self._rows = self.recorder.generation, [], 0
            if self._free:
                number = heapq.heappop(self._free)
            else:
                self._rows += 1
                number = self._rows
            return RowUse(self, self.recorder.row(f"{self._title} {number}"), number, self._generation)

    def leave(self, number: int, generation: int) -> None:
        """Give a row back."""
        with self._lock:
            if generation == self._generation:
                heapq.heappush(self._free, number)


class RowUse:
    """The use of a row. Records nothing once another timeline was started."""

    def __init__(self, rows: TimelineRows, row: int, number: int, generation: int) -> None:
        self._rows = rows
        self._recorder = rows.recorder
        self._row = row
        self._number = number
        self._generation = generation

    def begin(self, name: str, arguments: dict[str, Any], at: int | None = None) -> None:
        """A phase begins."""
        if self._is_current:
            self._recorder.begin(self._row, name, arguments, at)

    def end(self, arguments: dict[str, Any] | None = None, at: int | None = None) -> None:
        """The phase that began last ends."""
        if self._is_current:
            self._recorder.end(self._row, arguments, at)

    def leave(self) -> None:
        """Free the row."""
        self._rows.leave(self._number, self._generation)

    @property
    def _is_current(self) -> bool:
        return self._recorder.on and self._recorder.generation == self._generation


def begin_profiling(agent: Agent) -> None:
    """Tell torch this worker's rank: profiles show it as the node of an event."""
    rpc: Any = getattr(torch._C, "_distributed_rpc", None)
    if rpc is not None:
        rpc._set_profiler_node_id(agent.rank)


class _RecordedCall:
    """A call from this worker, while it lasts."""

    def __init__(self, agent: Agent, form: str, to: object, func: Any) -> None:
        """`form` is sync, async or remote. Raises: what Agent.worker raises."""
        callee = agent.worker(to)
        name = function_name(func)
        self._key = f"rpc_{form}#{name}({agent.me.name} -> {callee.name})"
        self._row = _enter(agent.fabric.recorder, "rpc calls")
        if self._row is not None:
            self._row.begin(f"rpc_{form} {name}", {"function": name, "callee": callee.name, "rank": callee.id})

    def range(self) -> AbstractContextManager[Any]:
        """Return the range of torch's profilers."""
        is_profiled = profiler._is_profiler_enabled or _autograd._profiler_enabled()
        return profiler.record_function(self._key) if is_profiled else nullcontext()

    def end(self, error: BaseException | None = None) -> None:
        """The call is over. Called once."""
        if self._row is not None:
            self._row.end({"error": type(error).__name__} if error is not None else None)
            self._row.leave()


class _RecordedPromise(Promise):
    """The promise of rpc_async, which ends the record of its call."""

    __slots__ = ("_call",)

    def __init__(self, call: _RecordedCall, range_: Any, devices: DeviceMaps) -> None:
        """`range_` is what entering the range of the call returned."""
        self._call = call
        # A range of kineto must not outlast its profile: if it ends in the next one, torch writes to freed memory.
        outlasts = range_ is not None and _is_legacy_profiler()
        super().__init__(range_._call_end_callbacks_on_future if outlasts else None, devices)

    def set_result(self, value: Any) -> None:
        """See Promise."""
        self._call.end()
        super().set_result(value)

    def set_error(self, error: Exception) -> None:
        """See Promise."""
        self._call.end(error)
        super().set_error(error)


def _is_legacy_profiler() -> bool:
    legacy = torch._C._profiler.ActiveProfilerType.LEGACY
    return bool(_autograd._profiler_enabled()) and torch._C._autograd._profiler_type() == legacy


def recorded_call(agent: Agent, form: str, call: Callable[..., Any], to: object, func: Any, *more: Any) -> Any:
    """Return call(agent, to, func, *more), recorded. `form` is sync or remote."""
    recorded = _RecordedCall(agent, form, to, func)
    try:
        with recorded.range():
            value = call(agent, to, func, *more)
    except BaseException as error:
        recorded.end(error)
        raise
    recorded.end()
    return value


def recorded_async(agent: Agent, call: Callable[..., Any], to: object, func: Any, *more: Any) -> Any:
    """Return the future of call(agent, promise, to, func, *more), recorded until it is done."""
    recorded = _RecordedCall(agent, "async", to, func)
    with recorded.range() as range_:
        promise = _RecordedPromise(recorded, range_, agent.devices)
        try:
            call(agent, promise, to, func, *more)
        except Exception as error:
            promise.set_error(error)
            raise
    return promise.future


class _RecordedRequest(Request):
    """A request of another worker, until it is answered."""

    __slots__ = ("_row",)

    def __init__(self, request: Request, row: RowUse | None) -> None:
        super().__init__(request.source, request.number, request.kind, request.packed, request.came, request.respond)
        self.about = describe_subject(request.about)
        self._row = row

    def answer(self, packed: Packed) -> None:
        """See Request."""
        self._end({"bytes": _bytes_of(packed)})
        super().answer(packed)

    def fail(self, error: BaseException | Description) -> None:
        """See Request."""
        self._end({"error": error.name if isinstance(error, Description) else type(error).__name__})
        super().fail(error)

    def _end(self, arguments: dict[str, Any]) -> None:
        if self._row is not None:
            self._row.end(arguments)
            self._row.leave()


def recorded_request(agent: Agent, request: Request, func: Any) -> tuple[Request, Any]:
    """Return the request and the function to serve instead, which record the wait and the run."""
    name, caller = function_name(func), agent.workers[request.source]
    recorder = agent.fabric.recorder
    row = _enter(recorder, "rpc serves")
    if row is not None:
        arguments = {
            "function": name,
            "caller": caller.name,
            "rank": caller.id,
            "bytes": _bytes_of(request.packed),
        }
        row.begin("QUEUE", arguments, recorder.now - int(1e9 * (time.monotonic() - request.came)))

    def run(*args: Any, **kwargs: Any) -> Any:
        if row is not None:
            row.end()
            row.begin("RUN", arguments)
        with _range_of_run(name, caller, agent.me):
            returned = func(*args, **kwargs)
        if row is not None and is_async(func):
            row.end()
            row.begin("LATER", arguments)
        return returned

    return _RecordedRequest(request, row), async_execution(run) if is_async(func) else run


def _bytes_of(packed: Packed) -> int:
    """Return the size of a message without its header."""
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
