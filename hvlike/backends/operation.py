"""The operation in flight: its states, how it ends, and what waits for it.

    WAITING    its turn has not come: other ranks have not asked for it, or other jobs are before it
    RUNNING    it has its turn on an op queue
    DONE       it has ended well
    FAILED     it has ended with an error

It is the handle that an asynchronous call returns, and what Horovod's `poll` and `synchronize` take.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import Any

from hvlike.errors import UnknownHandleError, WaitTimeoutError

_numbers = itertools.count()

Waiter = Callable[[Callable[[], bool], float | None], bool]  # False when the given seconds have passed first


class OperationState(enum.Enum):
    """How far an operation is; see the head of this file."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


_WAITING, _RUNNING, _DONE, _FAILED = OperationState


class Operation:
    """One operation in flight on this rank.

    Any thread may wait for it. Only one thread ends it: the one that drives the progress loop, or the one that carries
    the operation out by itself.
    """

    __slots__ = ("_callbacks", "awaited", "cleared", "error", "fence", "number", "state", "value", "waiter")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.awaited = False
        """A thread may sleep in the loop until it has ended, wherever it runs."""
        self.cleared = False
        self.state = _WAITING
        self.value: Any = None
        """The output, once it has ended well."""
        self.error: BaseException | None = None
        self.fence: Callable[[], None] | None = None
        """Called by every thread that has waited, before it uses the result: on a GPU it may not be done yet."""
        self.waiter: Waiter | None = None
        """Blocks until a condition holds, at most some seconds."""
        self._callbacks: list[Callable[[Operation], object]] | None = None

    def begin(self) -> None:
        """Note that its turn has come."""
        if self.state is _WAITING:
            self.state = _RUNNING

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended; the first call counts. Calls what `then` was given.

        Args:
            error: What `wait` and `result` raise. None: it has ended well, and `value` and `fence` are set.
        """
        if self.done():
            return
        self.error = error
        self.state = _DONE if error is None else _FAILED
        if self._callbacks:
            self._call_back(self._callbacks)

    def then(self, callback: Callable[[Operation], object]) -> None:
        """Have a function called once the operation has ended; at once if it has. Never blocks.

        Args:
            callback: Called with the operation, by the thread that ends it. It may start operations, but never wait.
        """
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self.done():
            self._call_back(self._callbacks)

    def _call_back(self, callbacks: list[Callable[[Operation], object]]) -> None:
        # `then` and `end` may meet: each callback is taken by one of them.
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return
            callback(self)

    def done(self) -> bool:
        """True once the operation has ended, well or badly. Never blocks."""
        return self.state is _DONE or self.state is _FAILED

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the operation has ended; on a GPU, until it is in a stream that the current one then waits for.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            True when it has ended, False when the time ran out before. The operation goes on then.

        Raises:
            HorovodInternalError: The error of the operation.
        """
        if not self.done() and self.waiter is not None:
            self.waiter(self.done, timeout)
        if not self.done():
            return False
        if self.error is not None:
            raise self.error
        if self.fence is not None:
            self.fence()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its output. May be called repeatedly.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            The output, as `synchronize`.

        Raises:
            HorovodInternalError: The error of the operation.
            TimeoutError: When the time ran out before.
        """
        if not self.wait(timeout):
            raise WaitTimeoutError(f"{self!r} has not ended within {timeout} s")
        return self.value

    def __int__(self) -> int:
        """A number of its own in this process: Horovod's handles are numbers."""
        return self.number

    def __repr__(self) -> str:
        return f"Operation({self.number}, {self.state.value})"


def poll(handle: Operation) -> bool:
    """Say whether an operation has ended. Never blocks.

    Args:
        handle: What an asynchronous call returned.

    Returns:
        True once `synchronize` would return (or raise) at once.

    Raises:
        UnknownHandleError: If it is not a handle, or was synchronized before (a ValueError).

    Source: horovod.torch.poll.
    """
    _check_known(handle)
    if not handle.done() and handle.waiter is not None:
        handle.waiter(handle.done, 0.0)
    return handle.done()


def synchronize(handle: Operation) -> Any:
    """Block until an operation has ended, return its output and forget the handle.

    Args:
        handle: What an asynchronous call returned.

    Returns:
        The output tensor, or a list of them for grouped operations.

    Raises:
        UnknownHandleError: If it is not a handle, or was synchronized before (a ValueError).
        HorovodInternalError: The error of the operation: MismatchError, PeerLeftError, StalledError, ShutdownError, ...

    Example:
        >>> handle = hvd.allreduce_async(tensor)
        >>> tensor = hvd.synchronize(handle)

    Source: horovod.torch.synchronize.
    """
    _check_known(handle)
    handle.cleared = True
    handle.wait()
    return handle.value


def _check_known(handle: object) -> None:
    if not isinstance(handle, Operation):
        raise UnknownHandleError(
            f"Handle {handle!r} was not created or has been cleared. Expected what an *_async call of this process "
            f"returned, got {type(handle).__name__}."
        )
    if handle.cleared:
        raise UnknownHandleError(
            f"Handle {handle.number} was not created or has been cleared. It was synchronized before: keep the output "
            "of the first synchronize, or call handle.result(), which may be repeated."
        )
