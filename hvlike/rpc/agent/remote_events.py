"""What torch's legacy profiler records of a call on the worker that serves it, brought to the worker that calls.

The caller sends `run_recorded` instead of its function. That runs the function under a profiler of its own and answers
with the result and the events. They wait for the caller's profiler, which takes them when it ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler_legacy
import torch.autograd.profiler_util

from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.functions import async_execution, is_async

# torch gives these no types.
_autograd: Any = torch.autograd
_legacy: Any = torch.autograd.profiler_legacy
_make_event: Any = torch.autograd.profiler_util.FunctionEvent

EVENTS = 40
"""Kind of the notice that brings the events of what `remote` has called."""


class Event(NamedTuple):
    """A range that was recorded somewhere."""

    name: str
    start: float
    """Microseconds of time.time()."""
    end: float
    thread: int
    rank: int
    input_shapes: list[list[int]]


class Recorded(NamedTuple):
    """A result and what was recorded while it was made."""

    value: Any
    events: list[Event]


def is_legacy() -> bool:
    """Whether the legacy profiler records this thread."""
    legacy = torch._C._profiler.ActiveProfilerType.LEGACY
    return bool(_autograd._profiler_enabled()) and torch._C._autograd._profiler_type() == legacy


def run_recorded(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recorded:
    """func(*args, **kwargs), and what the legacy profiler sees of it."""
    return _run(func, args, kwargs)[0]


def _run(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Recorded, Collection | None]:
    """The same, and where the events of calls come that it has left open."""
    if _autograd._profiler_enabled():
        return Recorded(func(*args, **kwargs), []), None
    began = time.time_ns() / 1000
    # Whether the caller's profiler wants shapes cannot be asked of it.
    with _legacy.profile(record_shapes=True) as profile:
        value = func(*args, **kwargs)
        collection = _of_thread.collection
    rank = current_agent().rank
    events = [
        Event(
            event.name,
            began + event.time_range.start,
            began + event.time_range.end,
            event.thread,
            event.node_id if event.is_remote else rank,
            event.input_shapes or [],
        )
        for event in profile.function_events
    ]
    return Recorded(value, events), collection


@async_execution
def run_recorded_later(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for a function that returns a future; of what runs later, only calls are recorded."""
    (future, events), collection = _run(func, args, kwargs)
    if not isinstance(future, torch._C.Future):
        return future
    return future.then(lambda done: Recorded(done.wait(), events + _late(collection)))


def _late(collection: Collection | None) -> list[Event]:
    return [] if collection is None else collection.late()


def run_and_tell(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], to: int, ticket: int) -> Any:
    """The result of func(*args, **kwargs) alone; the events go to the rank `to` ahead of it."""
    value, events = run_recorded(func, args, kwargs)
    _tell(to, ticket, events)
    return value


@async_execution
def run_and_tell_later(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], to: int, ticket: int
) -> Any:
    """The same for a function that returns a future."""
    (future, events), collection = _run(func, args, kwargs)
    if not isinstance(future, torch._C.Future):
        return future

    def tell(done: Any) -> Any:
        _tell(to, ticket, events + _late(collection))
        return done.wait()

    return future.then(tell)


def _tell(to: int, ticket: int, events: list[Event]) -> None:
    """Have the events at their profiler before anybody there can have the value."""
    agent = current_agent()
    if to == agent.rank:
        # On the owner itself the value does not travel: no message would be ahead of it.
        _hear(to, (ticket, events))
    else:
        agent.notify(to, EVENTS, (ticket, events))


def function_of(func: Any, args: Sequence[Any]) -> Any:
    """The function that a caller has asked for, where it is run by one of these."""
    return args[0] if func in (run_recorded, run_recorded_later, run_and_tell, run_and_tell_later) else func


class Collection:
    """What calls of one thread bring home while a legacy profiler records it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._has_ended = False
        self._tickets: dict[int, str] = {}
        self._first: tuple[str, float] | None = None

    def call(self, key: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """What to call, and with what, to have the events come with the result; `take` gets that."""
        self._began(key)
        return run_recorded_later if is_async(func) else run_recorded, (func, tuple(args or ()), dict(kwargs or {}))

    def call_for_rref(self, key: str, rank: int, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """The same where the result stays away: the events come by themselves."""
        self._began(key)
        ticket = next(_tickets)
        self._tickets[ticket] = key
        _awaiting[ticket] = self
        runner = run_and_tell_later if is_async(func) else run_and_tell
        return runner, (func, tuple(args or ()), dict(kwargs or {}), rank, ticket)

    def take(self, key: str, value: Any) -> Any:
        """The result of the call alone."""
        if not isinstance(value, Recorded):
            return value
        self.add(key, value.events)
        return value.value

    def add(self, key: str, events: list[Event]) -> None:
        """Keep what was recorded for the call `key`."""
        with self._lock:
            self._events += [event._replace(name=f"{key}#remote_op: {event.name}") for event in events]

    def call_ended(self, key: str, began: float, rank: int) -> None:
        """The call `key`, made at `began` on this `rank`, is over: where the profiler has ended before, note it."""
        with self._lock:
            if self._has_ended:
                self._events.append(Event(key, began, time.time_ns() / 1000, threading.get_native_id(), rank, []))

    def late(self) -> list[Event]:
        """What has come after the profiler ended."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def told(self, ticket: int, events: list[Event]) -> None:
        """Events have come by themselves."""
        self.add(self._tickets.pop(ticket), events)

    def ended(self, local: list[Any]) -> list[Any]:
        """The profiler has ended: what it has recorded and what has come home, in order of time."""
        for ticket in self._tickets:
            _awaiting.pop(ticket, None)
        with self._lock:
            self._has_ended = True
            events, self._events = self._events, []
        start = self._start(local)
        numbers = itertools.count(1 + max((event.id for event in local), default=0))
        remote = [
            _make_event(
                id=next(numbers),
                name=event.name,
                trace_name=event.name,
                thread=event.thread,
                start_us=event.start - start,
                end_us=event.end - start,
                stack=[],
                input_shapes=event.input_shapes,
                is_remote=True,
                node_id=event.rank,
                is_legacy=True,
            )
            for event in events
        ]
        return sorted(local + remote, key=lambda event: (event.time_range.start, -event.time_range.end))

    def _began(self, key: str) -> None:
        if self._first is None:
            self._first = (key, time.time_ns() / 1000)

    def _start(self, local: list[Any]) -> float:
        """When the profiler began, in microseconds of time.time(): seen from the first call, which it has recorded."""
        key, at = self._first or ("", 0.0)
        return at - next((event.time_range.start for event in local if event.name == key), 0.0)


class _OfThread(threading.local):
    collection: Collection | None = None


_of_thread = _OfThread()
_tickets = itertools.count(1)
_awaiting: dict[int, Collection] = {}


def collection() -> Collection:
    """That of the profiler which records this thread."""
    _watch_ends()
    if _of_thread.collection is None:
        _of_thread.collection = Collection()
    return _of_thread.collection


def install(agent: Agent) -> None:
    """Take the events that come by themselves."""
    agent.hear(EVENTS, _hear)


def _hear(source: int, value: tuple[Any, ...]) -> None:
    ticket, events = value
    awaiting = _awaiting.pop(ticket, None)
    if awaiting is not None:
        awaiting.told(ticket, events)


def _watch_ends() -> None:
    """Have legacy profilers look here when they end.

    torch adds events of other workers in C++ only, so this steps in where Python reads what was recorded.
    """
    parse = _legacy._parse_legacy_records
    if getattr(parse, "adds_remote_events", False):
        return

    def parse_and_add(records: Any) -> list[Any]:
        ended, _of_thread.collection = _of_thread.collection, None
        local: list[Any] = parse(records)
        return local if ended is None else ended.ended(local)

    parse_and_add.adds_remote_events = True  # type: ignore[attr-defined]
    _legacy._parse_legacy_records = parse_and_add
