"""rref.rpc_sync().method(...): call methods of a value on its owner."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvlike.rpc import calls, contexts
from hvlike.rpc.devices.devices import Devices
from hvlike.rpc.functions import async_execution, is_async
from hvlike.rpc.futures import Promise
from hvlike.rpc.rrefs import creation
from hvlike.rpc.rrefs.types import find_type

if TYPE_CHECKING:
    from hvlike.rpc.rref import RRef

_SHORTEST_SECONDS = 1e-6


class Proxy:
    """Stands for the value of an RRef: its methods run on the owner. Can be used again and again.

    An attribute that the type of the value lacks is an AttributeError, at the call or, with rpc_async, at `wait`.
    """

    __slots__ = ("_rref", "_start", "_timeout")

    def __init__(self, rref: RRef[Any], start: Callable[..., Any], timeout: float) -> None:
        """start: one of the functions below. timeout: seconds for the look-up of the type and the call together."""
        self._rref = rref
        self._start = start
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._rref, self._start, self._timeout, name)


def sync_proxy(rref: RRef[Any], timeout: float) -> Proxy:
    """A proxy whose methods return their result."""
    return Proxy(rref, calls.rpc_sync, timeout)


def async_proxy(rref: RRef[Any], timeout: float) -> Proxy:
    """A proxy whose methods return a future."""
    return Proxy(rref, calls.rpc_async, timeout)


def remote_proxy(rref: RRef[Any], timeout: float) -> Proxy:
    """A proxy whose methods return an RRef."""
    return Proxy(rref, creation.remote, timeout)


def _invoke(rref: RRef[Any], start: Callable[..., Any], timeout: float, name: str, *args: Any, **kwargs: Any) -> Any:
    limit = calls.seconds(rref.session.agent, timeout)
    began = time.monotonic()

    def call(cls: type) -> Any:
        left = max(limit - (time.monotonic() - began), _SHORTEST_SECONDS) if limit else 0.0
        return start(rref.owner(), _function_for(cls, name), (rref, name, args, kwargs), timeout=left)

    found = find_type(rref, limit)
    if start is not calls.rpc_async:
        return call(found.wait())
    return call_later(found, call, rref.session.agent.devices)


def call_later(
    found: torch.futures.Future[Any], call: Callable[[Any], torch.futures.Future[Any]], devices: Devices
) -> Any:
    """A future of what the future that `call` returns for the value of `found` completes with."""
    promise = Promise(devices=devices)

    # No tracebacks: their frames hold the promise, and the collector of garbage does not see into torch's futures.
    def copy(result: torch.futures.Future[Any]) -> None:
        try:
            promise.set_result(result.value())
        except Exception as error:
            promise.set_error(error.with_traceback(None))

    def begin(done: torch.futures.Future[Any]) -> None:
        try:
            call(done.value()).add_done_callback(copy)
        except Exception as error:
            promise.set_error(error.with_traceback(None))

    # The look-up may be another thread's, and end in its context.
    found.add_done_callback(contexts.kept(begin))
    return promise.future


def _function_for(cls: type, name: str) -> Callable[..., Any]:
    """What runs on the owner. Raises: AttributeError for an attribute that the type lacks."""
    if issubclass(cls, torch.jit.ScriptModule | torch._C.ScriptModule):
        # Its methods are not attributes of its type.
        return _local_invoke
    return _local_invoke_async_execution if is_async(getattr(cls, name)) else _local_invoke


def _local_invoke(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


@async_execution
def _local_invoke_async_execution(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)
