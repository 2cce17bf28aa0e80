"""The futures of rpc_async, and functions that answer their caller later (async_execution).

    @rpc.functions.async_execution
    def sum_of_two(to, x):
        return rpc.rpc_async(to, torch.add, (x, 1)).then(lambda future: future.wait() + 1)

The worker runs the function, gets a future from it, and sends the reply when that completes. No thread waits for it.

torch knows two kinds of failed futures. One is made in C++: it is always a RuntimeError, and Python makes it only by
raising in a callback of `then`. The other keeps a Python exception as its value and raises it in `wait`. Here plain
RuntimeErrors use the first kind and other classes the second, which torch's `wait_all` and `collect_all` take for a
success: those that init_rpc puts in their place end as soon as a future of either kind has failed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from hvlike.errors import RpcError, WorkerLostError
from hvlike.rpc.wire.devices import DeviceMaps
from hvlike.system.system import system
from hvlike.untraced import untraced

logger = logging.getLogger("hvlike")

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "_wrapped_async_rpc_function"  # As torch's decorator marks a function: its functions are served too


@untraced
class Promise:
    """The side of a torch future that completes it, and in that thread runs the user's callbacks, which may block."""

    __slots__ = ("_base", "_devices", "_error", "_value", "future")

    def __init__(self, through: Callable[[Any], Any] | None = None, devices: DeviceMaps | None = None) -> None:
        """through: gets a future that completes first, and returns the one that `future` follows.

        devices: the streams of who takes the value wait for the streams of these devices that computed it.
        """
        self._devices = devices
        self._value: Any = None
        self._error: Exception | None = None
        self._base: Any = torch._C.Future([])
        before = self._base if through is None else through(self._base)
        # Only what a callback of `then` raises fails a future in C++.
        self.future = cast("torch.futures.Future[Any]", before.then(self._outcome))

    def set_result(self, value: Any) -> None:
        """Complete the future, once, from any thread; runs its callbacks."""
        self._value = value
        if self._devices is not None and self._devices.used:
            events = self._devices.ready_events()
            # Called in the thread that takes the value, also in callbacks.
            self.future._set_unwrap_func(lambda _: events.follow())
        self._complete()

    def complete_with(self, compute: Callable[[], Any]) -> None:
        """Complete the future with what `compute` returns or raises."""
        try:
            value = compute()
        except Exception as error:
            # Its frames may hold this promise, and the garbage collector does not see into torch futures.
            self.set_error(error.with_traceback(None))
        else:
            self.set_result(value)

    def set_error(self, error: Exception) -> None:
        """Fail the future, once, from any thread; runs its callbacks."""
        if isinstance(error, RuntimeError) and not isinstance(error, WorkerLostError):
            self._error = error
        else:
            # A copy without the traceback: it may hold this promise, and the collector does not see into torch futures.
            self._value = _copy_error(error)
            self.future._set_unwrap_func(_raise_copy)
        self._complete()

    def _outcome(self, _: Any) -> Any:
        value, error = self._value, self._error
        self._value = self._error = None
        if error is not None:
            raise error.with_traceback(None) from None
        return value

    def _complete(self) -> None:
        try:
            self._base.set_result(None)
        except RuntimeError as refusal:
            # The program has called set_result on the future that rpc_async gave it.
            logger.debug("a future of rpc_async was completed before its reply came: %s", refusal)


def _raise_copy(value: Any) -> Any:
    """Raise a copy: the traceback of the exception in the future would keep the frames of its waiters alive."""
    if isinstance(value, Exception):
        raise _copy_error(value) from None
    return value


def _copy_error(error: Exception) -> Exception:
    try:
        copy = type(error)(*error.args)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    copy.__dict__.update(error.__dict__)
    return copy


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[list[Any]]:
    """Return a future of the list of these futures; it fails as soon as one of them has, with the same error.

    Local, does not block.

    Args:
        futures: Futures of RPC or of torch.

    Returns:
        A future that is done when all are, or one has failed.

    Source: torch.futures.collect_all, which init_rpc replaces by this.
    """
    collected: Any = torch._C.Future([])
    lock, missing = system.Lock(), len(futures)

    def ended(future: Any) -> None:
        nonlocal missing
        error = None
        try:
            future.wait()
        except Exception as caught:
            error = _copy_error(caught)
        with lock:
            if not missing:
                return
            missing = 0 if error is not None else missing - 1
            goes_on = missing > 0
        if error is not None:
            collected._set_unwrap_func(_raise_copy)
            collected.set_result(error)
        elif not goes_on:
            collected.set_result(list(futures))

    for each in futures:
        each.add_done_callback(ended)
    if not futures:
        collected.set_result([])
    return cast("torch.futures.Future[list[Any]]", collected)


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Return the values of these futures. Blocks until all are done, or one has failed.

    Args:
        futures: Futures of RPC or of torch.

    Raises:
        Exception: The error of the first future that has failed.

    Source: torch.futures.wait_all, which init_rpc replaces by this.
    """
    return [future.wait() for future in collect_all(futures).wait()]


def end_early() -> None:
    """Put `collect_all` and `wait_all` in place of torch's."""
    torch.futures.collect_all, torch.futures.wait_all = collect_all, wait_all


def async_execution(function: Function) -> Function:
    """Mark a function that returns a torch.futures.Future: its caller gets the value of the future.

    Called directly, the function works as before and returns its future. Local, does not block.

    Args:
        function: A function or a method. With staticmethod or classmethod, the order of the decorators does not matter.

    Returns:
        The function itself, or a wrapper if the mark cannot be set on it.

    Example:
        @rpc.functions.async_execution
        def add_on(to, x):
            return rpc.rpc_async(to, torch.add, (x, 1))

    Source: torch.distributed.rpc.functions.async_execution.
    """
    inner: Any = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    try:
        setattr(inner, _MARK, inner)
    except (AttributeError, TypeError):

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        setattr(call, _MARK, function)
        return call  # type: ignore[return-value]
    return function


def is_async(function: Any) -> bool:
    """True if async_execution has marked the function; also for a partial of it."""
    while isinstance(function, functools.partial):
        function = function.func
    return callable(getattr(function, _MARK, None))


def run(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    answer: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Run a function for a caller: `answer` gets what it returns, `fail` what it raises. Later if it is marked."""
    try:
        returned = func(*args, **kwargs)
        if is_async(func):
            _answer_later(returned, answer, fail)
            return
    except BaseException as error:
        fail(error)
    else:
        answer(returned)


def _answer_later(returned: Any, answer: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
    """Call `answer` with the value of the future, or `fail` with its error, in the thread that completes it."""
    if not isinstance(returned, torch._C.Future):
        kind = type(returned)
        raise RpcError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but got {kind.__module__}.{kind.__qualname__}."
        )

    def completed(future: Any) -> None:
        try:
            value = future.wait()
        except BaseException as error:
            fail(error)
        else:
            answer(value)

    returned.add_done_callback(completed)
