"""RPC calls as torch's profilers and the timeline show them, while one of them records.

In a profile a call is a range `rpc_<sync|async|remote>#<function>(<from> -> <to>)`: from the call until the reply is
here, for remote until the call returns. torch.profiler shows it on the calling worker; if it records all threads of the
serving worker, the function's run appears there too.

In the timeline a call has a row on both workers. The row of the serving worker shows QUEUE, until a thread is free and
the RRefs among the arguments are confirmed, then RUN, and for a function that answers later LATER.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.autograd import profiler

from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.futures import Promise, async_execution, is_async
from hvlike.rpc.wire.message import Description, Packed, ServedRequest, describe_subject, function_name
from hvlike.system.system import of_process, system

_autograd: Any = torch.autograd


class _Rows:
    def __init__(self) -> None:
        self.lock = system.Lock()
        self.used: dict[str, set[int]] = {}  # The numbers that are taken, by title


_rows = of_process(_Rows)


class TimelineRow:
    """A row "<title> <number>" of this worker's timeline, the first free one: for things that overlap."""

    def __init__(self, recorder: Recorder, title: str) -> None:
        self._recorder = recorder
        self._generation = recorder.generation
        self._numbers = _rows.used.setdefault(title, set())
        with _rows.lock:
            self._number = next(number for number in count(1) if number not in self._numbers)
            self._numbers.add(self._number)
        self._row = recorder.row(f"{title} {self._number}")

    def begin(self, name: str, arguments: dict[str, Any], at: int | None = None) -> None:
        """A phase begins. Like `end`, it records nothing once another timeline was started."""
        if self._is_current:
            self._recorder.begin(self._row, name, arguments, at)

    def end(self, arguments: dict[str, Any] | None = None, at: int | None = None) -> None:
        if self._is_current:
            self._recorder.end(self._row, arguments, at)

    def leave(self) -> None:
        self._numbers.discard(self._number)

    @property
    def _is_current(self) -> bool:
        return self._recorder.on and self._recorder.generation == self._generation


class _RecordedCall:
    """A call from this worker, while it lasts."""

    def __init__(self, agent: Agent, form: str, to: object, func: Any) -> None:
        callee = agent.worker(to)
        name = function_name(func)
        self._key = f"rpc_{form}#{name}({agent.me.name} -> {callee.name})"
        self._row = _enter(agent, "rpc calls")
        if self._row is not None:
            self._row.begin(f"rpc_{form} {name}", {"function": name, "callee": callee.name, "rank": callee.id})

    def range(self) -> AbstractContextManager[Any]:
        is_profiled = profiler._is_profiler_enabled or _autograd._profiler_enabled()
        return profiler.record_function(self._key) if is_profiled else nullcontext()

    def end(self, error: BaseException | None = None) -> None:
        """The call is over. Called once."""
        if self._row is not None:
            self._row.end({"error": type(error).__name__} if error is not None else None)
            self._row.leave()


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
    """Return the future of call(agent, promise, ended, to, func, *more), recorded until `ended` is called."""
    recorded = _RecordedCall(agent, "async", to, func)
    with recorded.range() as range_:
        # A range of kineto must not outlast its profile: if it ends in the next one, torch writes to freed memory.
        legacy = torch._C._profiler.ActiveProfilerType.LEGACY
        outlasts = range_ is not None and torch._C._autograd._profiler_type() == legacy
        promise = Promise(range_._call_end_callbacks_on_future if outlasts else None, agent.devices)
        try:
            call(agent, promise, recorded.end, to, func, *more)
        except Exception as error:
            recorded.end(error)
            promise.set_error(error)
            raise
    return promise.future


def recorded_request(agent: Agent, request: ServedRequest, func: Any) -> Any:
    """Record the wait, the run and the answer of a request. Returns the function to run instead."""
    name, caller = function_name(func), agent.workers[request.source]
    request.about = describe_subject(request.about)
    row = _enter(agent, "rpc serves")
    if row is not None:
        size = _bytes_of(request.packed)
        arguments = {"function": name, "caller": caller.name, "rank": caller.id, "bytes": size}
        row.begin("QUEUE", arguments, agent.fabric.recorder.now - int(1e9 * (system.monotonic() - request.came)))
        request.respond = partial(_record_end, row, request.respond)

    def run(*args: Any, **kwargs: Any) -> Any:
        if row is not None:
            row.end()
            row.begin("RUN", arguments)
        is_profiled = profiler._is_profiler_enabled
        key = f"rpc_run#{name}({caller.name} -> {agent.me.name})"
        with profiler.record_function(key) if is_profiled else nullcontext():
            returned = func(*args, **kwargs)
        if row is not None and is_async(func):
            row.end()
            row.begin("LATER", arguments)
        return returned

    return async_execution(run) if is_async(func) else run


def _record_end(row: TimelineRow, respond: Callable[..., None], request: ServedRequest, result: Any) -> None:
    if isinstance(result, Packed):
        row.end({"bytes": _bytes_of(result)})
    else:
        row.end({"error": result.name if isinstance(result, Description) else type(result).__name__})
    row.leave()
    respond(request, result)


def _bytes_of(packed: Packed) -> int:
    return len(packed.body) + sum(storage.numel() for storage in packed.storages)


def _enter(agent: Agent, title: str) -> TimelineRow | None:
    return TimelineRow(agent.fabric.recorder, title) if agent.fabric.recorder.on else None
