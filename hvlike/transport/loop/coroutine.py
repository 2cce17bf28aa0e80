"""Coroutines: every protocol is a generator that yields while it waits.

A coroutine never blocks. It does what can be done now, yields how it waits (`Wait`), and is advanced again later.

Who may advance a coroutine: only the thread that drives the loop (it holds the loop's drive lock); before the coroutine
was handed to the loop, only the one thread that made it. The loop raises StateError for a second driver.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from hvlike.errors import StateError
from hvlike.system.system import system

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Wait(enum.IntEnum):
    """What a coroutine yields: how the loop may wait before it advances the coroutine again."""

    NOTIFY = 0  # Nothing to do until another rank or thread rings this rank's doorbell
    POLL = 1  # An MPI request is pending: test again soon, nothing rings for it
    AGAIN = 2  # Progress was made and more may be possible at once


Coroutine: TypeAlias = Generator[Wait, None, T]


def complete(requests: Iterable[Any]) -> Coroutine[None]:
    for request in requests:
        while not request.Test():
            yield Wait.POLL


def pause(seconds: float, wait: Wait = Wait.NOTIFY) -> Coroutine[None]:
    """Let so much time pass. wait: POLL where it ends between two of the loop's looks around."""
    until = system.monotonic() + seconds
    while system.monotonic() < until:
        yield wait


def in_loop(function: F) -> F:
    """Mark a method that only the driver of the loop calls, or anybody once that has ended. Free; tests check it."""
    IN_LOOP.append(function)
    return function


IN_LOOP: list[Callable[..., Any]] = []
"""All that is marked."""


def not_the_driver(what: str) -> StateError:
    """The error for a thread that calls what only the loop's driver may call."""
    return StateError(
        f"{what} was called by thread {threading.current_thread().name!r}, which does not drive the progress loop: "
        "only the driver may advance a coroutine. Hand it over with post() or perform()."
    )


def explain(error: Exception, coroutine: Coroutine[Any]) -> Exception:
    """The error that a coroutine has ended with; in words of ours where Python says that another thread advances it.

    Without the frame of the caller: it leads to all others of that thread, and what has failed may be kept for long.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    if str(error) != "generator already executing":
        return error
    return StateError(
        f"two threads advance the coroutine {getattr(coroutine, '__qualname__', coroutine)} at the same time: once it "
        "was handed to the loop, only the loop's driver may advance it; before, only the thread that made it"
    )


@dataclass(eq=False, slots=True)
class Task(Generic[T]):
    """A coroutine in the loop and, in time, its result or error. The loop writes all fields."""

    coroutine: Coroutine[T]
    after: Callable[[Task[T]], None] | None  # Called in the loop once `done` is true
    done: bool = False
    result: T | None = None
    error: BaseException | None = None
