"""Functions that wait on a worker until another one lets them go on, and futures that are completed that way."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from hvlike.rpc.functions import async_execution

_SECONDS = 60.0
_lock = threading.Lock()
_doors: dict[str, threading.Event] = {}
_futures: dict[str, torch.futures.Future[Any]] = {}
_passed: list[str] = []


def door(name: str) -> threading.Event:
    """The door of this name on this worker; shut at first."""
    with _lock:
        return _doors.setdefault(name, threading.Event())


def open_door(name: str) -> None:
    """Let those go on who wait at it, and all who come."""
    door(name).set()


def pass_door(name: str, value: Any = None) -> Any:
    """Return `value` once the door is open. Holds its thread."""
    if not door(name).wait(_SECONDS):
        raise AssertionError(f"nobody has opened {name}")
    with _lock:
        _passed.append(name)
    return value


def passes(name: str) -> int:
    """How often somebody has gone through on this worker."""
    with _lock:
        return _passed.count(name)


def promised(name: str) -> torch.futures.Future[Any]:
    """The future of this name on this worker."""
    with _lock:
        return _futures.setdefault(name, torch.futures.Future())


@async_execution
def await_promise(name: str) -> torch.futures.Future[Any]:
    """Answers with what `keep_promise` completes it with. Holds no thread."""
    return promised(name)


def keep_promise(name: str, value: Any = None) -> None:
    """Complete the future of this name."""
    promised(name).set_result(value)


def break_promise(name: str, error: Exception) -> None:
    """Fail the future of this name."""
    promised(name).set_exception(error)


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, f"{condition} does not come"
        time.sleep(0.002)
