"""The three forms of a call: each runs a function on a worker, and returns what it returns or raises its error."""

from collections.abc import Callable, Sequence
from typing import Any

import hvlike.rpc

Form = Callable[..., Any]


def synchronous(to: Any, func: Any, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> Any:
    return hvlike.rpc.rpc_sync(to, func, args, kwargs)


def asynchronous(to: Any, func: Any, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> Any:
    return hvlike.rpc.rpc_async(to, func, args, kwargs).wait()


def referred(to: Any, func: Any, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> Any:
    return hvlike.rpc.remote(to, func, args, kwargs).to_here()


FORMS: dict[str, Form] = {"sync": synchronous, "async": asynchronous, "remote": referred}
