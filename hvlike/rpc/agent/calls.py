"""rpc_sync and rpc_async: run a function on another worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hvlike.errors import RpcError, WrongTypeError
from hvlike.rpc import rrefs
from hvlike.rpc.agent import profiling
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.agent.options import checked_timeout
from hvlike.rpc.agent.profiling import is_recorded, observed_async, observed_request, observed_sync
from hvlike.rpc.constants import UNSET_RPC_TIMEOUT
from hvlike.rpc.functions import is_async, run
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT
from hvlike.rpc.wire.message import CALL, Call, Packed, Request, WorkerInfo, rebuild_error
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack

Destination = str | int | WorkerInfo


class _Gathering(threading.local):
    futures: list[torch.futures.Future[Any]] | None = None


_gathering = _Gathering()


def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run func(*args, **kwargs) on a worker and return the result.

    to: name, rank or WorkerInfo, also this worker. func: travels by its name; args, kwargs: as pickle copies them,
    tensors out of band. timeout: seconds, 0 for none; the default of init_rpc otherwise.
    Blocks until the result is here; serves others meanwhile.
    Raises: RuntimeError outside of a session, for an unknown worker, when the time is over or the worker is gone; what
        pickle raises; TypeError for a func that cannot be called; ValueError and TypeError of the function as they are,
        other exceptions of it as a RuntimeError that begins with the name of their class.
    Source: torch.distributed.rpc.rpc_sync.
    """
    agent = current_agent()
    if is_recorded(agent.fabric.recorder):
        return observed_sync(agent, _call, to, func, args, kwargs, timeout)
    return _call(agent, to, func, args, kwargs, timeout)


def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Start func(*args, **kwargs) on a worker and return a future of its result.

    Arguments as for rpc_sync. Does not block; tensors among the arguments must not change before the future is done.
    Raises: at once what rpc_sync raises for arguments; the rest in `wait` of the future.
    Source: torch.distributed.rpc.rpc_async.
    """
    agent = current_agent()
    if is_recorded(agent.fabric.recorder):
        return observed_async(agent, _promise, to, func, args, kwargs, timeout)
    promise = Promise(devices=agent.devices)
    _promise(agent, promise, to, func, args, kwargs, timeout)
    return promise.future


@contextmanager
def gather_futures() -> Iterator[list[torch.futures.Future[Any]]]:
    """The futures that rpc_async gives this thread inside the block."""
    futures: list[torch.futures.Future[Any]] = []
    before, _gathering.futures = _gathering.futures, futures
    try:
        yield futures
    finally:
        _gathering.futures = before


def serve_calls(agent: Agent) -> None:
    """Have this worker run the functions that others call."""
    agent.serve(CALL, partial(_serve_call, agent))
    profiling.begin_profiling(agent)


def result_of(agent: Agent, call: Call, *, original: bool = False) -> Any:
    """The result of a call that has ended. Raises: its error; original: of the class that was raised, if it can be."""
    if call.reply is not None:
        return unpack(call.reply, Incoming(call.rank))
    if call.failure is not None:
        raise rebuild_error(call.failure, original=original)
    if call.error is None:
        raise RpcError("This call has not ended.")
    raise call.error


def time_limit(agent: Agent, timeout: float) -> float:
    """The time limit of a call as it is made; 0: none. Raises: ValueError for anything but a number."""
    if timeout == UNSET_RPC_TIMEOUT:
        return agent.timeout
    return checked_timeout("timeout", timeout)


def pack_call(
    agent: Agent,
    rank: int,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> Packed:
    """A function and its arguments, on their way to a worker. Raises: TypeError, and what pickle raises."""
    if not callable(func):
        raise WrongTypeError("function should be callable.")
    outgoing = Outgoing(
        rank,
        cloudpickle=agent.options.cloudpickle,
        context=autograd_hooks.current_context(),
        about=func,
        records=torch.is_grad_enabled(),
        device_map=agent.devices.of_requests(rank),
        what=f"Request to {agent.workers[rank].name}",
    )
    return pack((func, tuple(args) if args else (), dict(kwargs) if kwargs else {}), outgoing)


def pack_answer(agent: Agent, request: Request, value: Any) -> Packed:
    """A value on its way to who has asked for it, in the context of the request. Raises: what pickle raises."""
    outgoing = Outgoing(
        request.source,
        cloudpickle=agent.options.cloudpickle,
        context=request.packed.context,
        about=request.about,
        device_map=agent.devices.of_answers(request.source),
        what=f"Response to {agent.workers[request.source].name}",
    )
    return pack(value, outgoing)


def _call(
    agent: Agent,
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> Any:
    call = _start(agent, to, func, args, kwargs, timeout, None)
    agent.wait(call)
    return result_of(agent, call)


def _promise(
    agent: Agent,
    promise: Promise,
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> None:
    then: Callable[[Call], None] = partial(_fulfil, agent, promise)
    if autograd_hooks.current_context() != NO_CONTEXT or not torch.is_grad_enabled():
        then = autograd_hooks.keep_context(then)
    _start(agent, to, func, args, kwargs, timeout, then)
    if _gathering.futures is not None:
        _gathering.futures.append(promise.future)


def _start(
    agent: Agent,
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    then: Callable[[Call], None] | None,
) -> Call:
    rank = agent.worker(to).id
    limit = time_limit(agent, timeout)
    packed = pack_call(agent, rank, func, args, kwargs)
    return agent.request(rank, CALL, packed, timeout=limit, then=then, now=then is not None)


def _fulfil(agent: Agent, promise: Promise, call: Call) -> None:
    try:
        value = result_of(agent, call)
    except Exception as caught:
        error = caught
    else:
        promise.set_result(value)
        return
    # Callbacks run in there: what they raise has not come up while this was handled.
    promise.set_error(error)


def _serve_call(agent: Agent, request: Request) -> None:
    """Serve a call: in a thread of its own time."""
    incoming = Incoming(request.source)
    func, args, kwargs = unpack(request.packed, incoming)
    request.about = func
    if is_recorded(agent.fabric.recorder):
        request, func = observed_request(agent, request, func, args)
    request.answers_last = not is_async(func)
    start = partial(run, func, args, kwargs, partial(_answer, agent, request), request.fail)
    if incoming.rrefs:
        rrefs.when_confirmed(incoming.rrefs, autograd_hooks.bind_context(request.packed.context, start))
    else:
        start()


def _answer(agent: Agent, request: Request, value: Any) -> None:
    try:
        packed = pack_answer(agent, request, value)
    except Exception as error:
        unsendable = RuntimeError(f"The result cannot be sent: {type(error).__name__}: {error}")
        unsendable.__cause__ = error
        request.fail(unsendable)
    else:
        request.answer(packed)
