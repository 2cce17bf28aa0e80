"""Calls on the value of an RRef, run on its owner: rref.rpc_sync().method(...), its type, and RRef.backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvlike.errors import RpcError
from hvlike.rpc.agent.calls import rpc_async, rpc_sync, time_limit
from hvlike.rpc.agent.futures import Promise, async_execution, is_async
from hvlike.rpc.rrefs.lifetime import OwnedValue
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, autograd_hooks, bind_caller
from hvlike.system.system import system

if TYPE_CHECKING:
    from hvlike.rpc.rrefs.rref import RRef

_SHORTEST_SECONDS = 1e-6


class Proxy:
    """Stands for the value of an RRef: its methods run on the owner. Can be used any number of times.

    An attribute that the value's type does not have raises AttributeError: at the call, with rpc_async in `wait`.
    """

    __slots__ = ("_rref", "_start", "_timeout")

    def __init__(self, rref: RRef[Any], start: Callable[..., Any], timeout: float) -> None:
        """`start` is rpc_sync, rpc_async or remote. `timeout` covers both the look-up of the type and the call."""
        self._rref = rref
        self._start = start
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._rref, self._start, self._timeout, name)


def _invoke(rref: RRef[Any], start: Callable[..., Any], timeout: float, name: str, *args: Any, **kwargs: Any) -> Any:
    limit = time_limit(rref.session.agent, timeout)
    began = system.monotonic()

    def call(cls: type) -> Any:
        left = max(limit - (system.monotonic() - began), _SHORTEST_SECONDS) if limit else 0.0
        return start(rref.owner(), _function_for(cls, name), (rref, name, args, kwargs), timeout=left)

    found = find_type(rref, limit)
    return _call_later(rref, found, call) if start is rpc_async else call(found.wait())


def _call_later(
    rref: RRef[Any], found: torch.futures.Future[Any], call: Callable[[Any], torch.futures.Future[Any]]
) -> torch.futures.Future[Any]:
    """Return a future that completes with the future which `call` returns for the type."""
    promise = Promise(devices=rref.session.agent.devices)

    def begin(done: torch.futures.Future[Any]) -> None:
        try:
            call(done.value()).add_done_callback(lambda result: promise.complete_with(result.value))
        except Exception as error:
            promise.set_error(error.with_traceback(None))

    # Another thread may have started the look-up, in another context.
    found.add_done_callback(bind_caller(begin))
    return promise.future


def _function_for(cls: type, name: str) -> Callable[..., Any]:
    if issubclass(cls, torch.jit.ScriptModule | torch._C.ScriptModule):
        # Its methods are not attributes of its type.
        return _local_invoke
    return _local_invoke_async_execution if is_async(getattr(cls, name)) else _local_invoke


def _local_invoke(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


@async_execution
def _local_invoke_async_execution(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


def find_type(rref: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """Return a future of the value's type: asked once, then kept with the RRef unless it failed. Does not block."""
    found = rref.type_future
    # After a failure the next use asks again: it may have been the time limit.
    if found is not None and not _has_failed(found):
        return found
    if rref.creation is not None:
        rref.creation.check()
    if isinstance(rref.held, OwnedValue) and rref.held.settled and rref.held.failure is None:
        promise = Promise()
        promise.set_result(type(rref.held.value))
        found = promise.future
    else:
        found = rpc_async(rref.owner(), _rref_typeof_on_owner, (rref,), timeout=timeout)
    rref.type_future = found
    return found


def _has_failed(found: torch.futures.Future[Any]) -> bool:
    try:
        if found.done():
            found.value()
    except Exception as error:
        # Its frames hold the RRef, and the garbage collector does not see into torch futures.
        error.__traceback__ = None
        return True
    return False


@async_execution
def _rref_typeof_on_owner(rref: RRef[Any]) -> torch.futures.Future[Any]:
    """Runs on the owner; no thread waits while the value is computed."""
    promise = Promise()
    if not isinstance(rref.held, OwnedValue):
        raise RpcError(f"{rref.name} has come to a worker that does not own it.")
    rref.session.when_settled(rref.held, partial(promise.complete_with, lambda: type(rref.local_value())))
    return promise.future


def backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    if not rref.is_owner():
        if context_id == NO_CONTEXT:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        rpc_sync(rref.owner(), backward, (rref, context_id, retain_graph))
        return
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id == NO_CONTEXT:
        torch.autograd.backward(value, retain_graph=retain_graph)
    else:
        autograd_hooks().backward(context_id, [value], retain_graph)
