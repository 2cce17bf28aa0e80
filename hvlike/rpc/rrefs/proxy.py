"""Calls on the value of an RRef, run on its owner: rref.rpc_sync().method(...), its type, and RRef.backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvlike.errors import RpcError
from hvlike.rpc.agent import calls
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.functions import async_execution, is_async
from hvlike.rpc.rrefs import rref as creation
from hvlike.rpc.rrefs.records import OwnedValue
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT
from hvlike.rpc.wire.devices import DeviceMaps

if TYPE_CHECKING:
    from hvlike.rpc.rrefs.rref import RRef


def find_type(rref: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """A future of the type of the value of `rref`; the same one while it has not failed. Does not block."""
    found = rref.type_future
    # Who waited for a failure may be back before its callback has run.
    if found is not None and not _has_failed(found):
        return found
    if rref.creation is not None:
        rref.creation.check()
    if isinstance(rref.held, OwnedValue) and rref.held.settled and rref.held.failure is None:
        promise = Promise()
        promise.set_result(type(rref.held.value))
        found = promise.future
    else:
        found = calls.rpc_async(rref.owner(), _rref_typeof_on_owner, (rref,), timeout=timeout)
    rref.type_future = found
    found.add_done_callback(partial(_forget_failure, rref))
    return found


def _has_failed(found: torch.futures.Future[Any]) -> bool:
    try:
        if found.done():
            found.value()
    except Exception as error:
        # Its frames hold the RRef, and the collector of garbage does not see into torch's futures.
        error.__traceback__ = None
        return True
    return False


def _forget_failure(rref: RRef[Any], found: torch.futures.Future[Any]) -> None:
    # Asked again next time: it may have been the time limit. Whoever waits for the future gets the error.
    if _has_failed(found) and rref.type_future is found:
        rref.type_future = None


@async_execution
def _rref_typeof_on_owner(rref: RRef[Any]) -> torch.futures.Future[Any]:
    """Runs on the owner; no thread waits while the value is computed."""
    promise = Promise()

    def answer() -> None:
        try:
            promise.set_result(type(rref.local_value()))
        except Exception as error:
            promise.set_error(error.with_traceback(None))

    if not isinstance(rref.held, OwnedValue):
        raise RpcError(f"{rref.name} has come to a worker that does not own it.")
    rref.session.when_settled(rref.held, answer)
    return promise.future


def backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """See RRef.backward."""
    if not rref.is_owner():
        if context_id == NO_CONTEXT:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        calls.rpc_sync(rref.owner(), backward, (rref, context_id, retain_graph))
        return
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id == NO_CONTEXT:
        torch.autograd.backward(value, retain_graph=retain_graph)
    else:
        autograd_hooks.autograd_hooks().backward(context_id, [value], retain_graph)


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
    limit = calls.time_limit(rref.session.agent, timeout)
    began = time.monotonic()

    def call(cls: type) -> Any:
        left = max(limit - (time.monotonic() - began), _SHORTEST_SECONDS) if limit else 0.0
        return start(rref.owner(), _function_for(cls, name), (rref, name, args, kwargs), timeout=left)

    found = find_type(rref, limit)
    if start is not calls.rpc_async:
        return call(found.wait())
    return call_later(found, call, rref.session.agent.devices)


def call_later(
    found: torch.futures.Future[Any], call: Callable[[Any], torch.futures.Future[Any]], devices: DeviceMaps
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
    found.add_done_callback(autograd_hooks.keep_context(begin))
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
