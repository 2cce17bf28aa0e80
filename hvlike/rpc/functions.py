"""async_execution: functions that answer their caller later.

    @rpc.functions.async_execution
    def sum_of_two(to, x):
        return rpc.rpc_async(to, torch.add, (x, 1)).then(lambda future: future.wait() + 1)

The worker runs the function, gets a future from it, and sends the answer when that completes. No thread waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hvlike.errors import RpcError

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "_wrapped_async_rpc_function"
"""The attribute by which torch's decorator marks a function: what it has decorated is served too."""


def async_execution(function: Function) -> Function:
    """Mark a function that returns a torch.futures.Future: its caller gets what that completes with.

    function: also a method, or a static or class method, with this decorator inside of or around the other one.
    Called directly, the function works as before and returns its future. Local, does not block.
    Source: torch.distributed.rpc.functions.async_execution.
    """
    inner: Any = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    try:
        setattr(inner, _MARK, inner)
    except (AttributeError, TypeError):
        return _wrapped(function)
    return function


def is_async(function: Any) -> bool:
    """Whether async_execution has marked what is called here; a partial of it counts."""
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
    """Run a function for a caller: `answer` gets what it returns, or `fail` what it raises; later if it is marked.

    Never raises; `answer` and `fail` must not either.
    """
    try:
        returned = func(*args, **kwargs)
        if is_async(func):
            answer_later(returned, answer, fail)
            return
    except BaseException as error:
        fail(error)
    else:
        answer(returned)


def answer_later(returned: Any, answer: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
    """Call `answer` with what the future completes with, or `fail` with its error: now if it is done, else later.

    Does not block and holds no thread; later they run in the thread that completes the future. They must not raise.
    returned: what a marked function has returned. Raises: RuntimeError if that is no future.
    """
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


def _wrapped(function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(call, _MARK, function)
    return call  # type: ignore[return-value]
