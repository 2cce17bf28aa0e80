"""Handles: how a caller waits for an operation that was started.

A handle is future-like (`wait`, `done`, `result`) and is what Horovod's `poll` and `synchronize` take.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from hvlike.errors import UnknownHandleError, WaitTimeoutError

_numbers = itertools.count()

Waiter = Callable[[Callable[[], bool], float | None], bool]
"""Blocks until the condition holds or so many seconds have passed; False in the latter case."""


class Handle:
    """One operation in flight on this rank."""

    __slots__ = ("_done", "_error", "_fence", "_lock", "_result", "_waiter", "cleared", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.cleared = False
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._fence: Callable[[], None] | None = None
        self._waiter: Waiter | None = None
        self._lock = threading.Lock()

    def attach(self, waiter: Waiter) -> None:
        """Say how to wait; done by whoever submits the operation."""
        self._waiter = waiter

    def complete(self, result: Any, error: BaseException | None, fence: Callable[[], None] | None = None) -> None:
        """Record how it ended; the first call counts.

        fence: called by every thread that has waited, before it uses the result: what is on a GPU may not be done yet.
        """
        with self._lock:
            if not self._done:
                self._result, self._error, self._fence = result, error, fence
                self._done = True

    def done(self) -> bool:
        """True once the operation has ended, well or badly. Never blocks."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the operation has ended; on a GPU, until it is in a stream that the current one then waits for.

        timeout: seconds, None for no limit.
        Returns True when it has ended, False when the time ran out before (the operation goes on).
        Raises: the error of the operation.
        """
        if not self._done and self._waiter is not None:
            self._waiter(self.done, timeout)
        if self._done and self._error is not None:
            raise self._error
        if self._done and self._fence is not None:
            self._fence()
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its output; may be called repeatedly.

        Raises: the error of the operation; TimeoutError when `timeout` seconds have passed before.
        """
        if not self.wait(timeout):
            raise WaitTimeoutError(f"the operation of {self!r} has not ended within {timeout} s")
        return self._result

    def __repr__(self) -> str:
        state = "done" if self._done else "in flight"
        return f"Handle({self.number}, {state})"


def poll(handle: Handle) -> bool:
    """Say whether the operation of `handle` has ended; never blocks.

    Returns True once `synchronize` would return (or raise) at once.
    Raises: UnknownHandleError (a ValueError) for what is no handle or was synchronised before.
    Source: horovod.torch.poll.
    """
    known = _known(handle)
    if not known.done() and known._waiter is not None:
        known._waiter(known.done, 0.0)
    return known.done()


def synchronize(handle: Handle) -> Any:
    """Block until the operation of `handle` has ended, return its output and forget the handle.

    Returns the output tensor, or a list of them for grouped operations.
    Raises: UnknownHandleError (a ValueError) for what is no handle or was synchronised before; else the error of
    the operation: MismatchError, PeerLeftError, StalledError, ShutdownError (all HorovodInternalError).
    Source: horovod.torch.synchronize.
    """
    known = _known(handle)
    known.cleared = True
    return known.result()


def _known(handle: object) -> Handle:
    if not isinstance(handle, Handle):
        raise UnknownHandleError(
            f"Handle {handle!r} was not created or has been cleared. Expected what an *_async call of this process "
            f"returned, got {type(handle).__name__}."
        )
    if handle.cleared:
        raise UnknownHandleError(
            f"Handle {handle.number} was not created or has been cleared. It was synchronised before: keep the output "
            "of the first synchronize, or call handle.result(), which may be repeated."
        )
    return handle
