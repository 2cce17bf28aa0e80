"""rpc_sync and rpc_async: run a function on another worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hvlike.errors import RpcError, WorkerLostError, WrongTypeError
from hvlike.rpc.agent.agent import Agent, Call, current_agent
from hvlike.rpc.agent.futures import Promise, end_early, is_async, run
from hvlike.rpc.agent.options import UNSET_RPC_TIMEOUT, checked_timeout
from hvlike.rpc.agent.profiling import recorded_async, recorded_call, recorded_request
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, bind_caller, bind_context, this_thread
from hvlike.rpc.wire.message import CALL, Packed, ServedRequest, WorkerInfo, rebuild_error
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, unpack

Destination = str | int | WorkerInfo


class _Gathered(threading.local):
    futures: list[torch.futures.Future[Any]] | None = None


_gathered = _Gathered()


def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on a worker and return the result. Blocks, and serves other workers meanwhile.

    Args:
        to: Name, rank or WorkerInfo of the worker; this worker too.
        func: A function that both workers can import; it travels by its name.
        args: Positional arguments. They travel as pickle copies them, tensors out of band.
        kwargs: Keyword arguments, likewise.
        timeout: Seconds; 0: no limit; default: that of init_rpc.

    Returns:
        A copy of what the function returns.

    Raises:
        RuntimeError: Outside of a session, for an unknown worker, when the time is over or the worker is gone. Also for
            an exception of the function that is no ValueError or TypeError; the text begins with the name of its class.
        ValueError: Raised by the function.
        TypeError: Raised by the function, or `func` cannot be called.
        Exception: What pickle raises for arguments that it cannot copy.

    Example:
        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))

    Source: torch.distributed.rpc.rpc_sync.
    """
    agent = current_agent()
    if agent.is_recorded:
        return recorded_call(agent, "sync", _sync, to, func, args, kwargs, timeout)
    return _sync(agent, to, func, args, kwargs, timeout)


def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Start `func(*args, **kwargs)` on a worker and return a future of the result. Does not block.

    Tensors among the arguments must not change before the future is done.

    Args:
        to: Name, rank or WorkerInfo of the worker; this worker too.
        func: A function that both workers can import; it travels by its name.
        args: Positional arguments. They travel as pickle copies them, tensors out of band.
        kwargs: Keyword arguments, likewise.
        timeout: Seconds; 0: no limit; default: that of init_rpc.

    Returns:
        A future. `wait` returns a copy of what the function returns, or raises what rpc_sync raises.

    Raises:
        RuntimeError: Outside of a session, and for an unknown worker.
        TypeError: `func` cannot be called.
        Exception: What pickle raises for arguments that it cannot copy.

    Example:
        future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
        total = future.wait()

    Source: torch.distributed.rpc.rpc_async.
    """
    agent = current_agent()
    if agent.is_recorded:
        future: torch.futures.Future[Any] = recorded_async(agent, _async, to, func, args, kwargs, timeout)
        return future
    promise = Promise(devices=agent.devices)
    _async(agent, promise, None, to, func, args, kwargs, timeout)
    return promise.future


@contextmanager
def wait_all() -> Iterator[None]:
    """Context manager: wait at its end for all calls that this thread started in it with rpc_async.

    Raises:
        Exception: The error of the first call that failed.

    Source: torch.distributed.rpc.api._wait_all.
    """
    futures: list[torch.futures.Future[Any]] = []
    before, _gathered.futures = _gathered.futures, futures
    try:
        yield
    finally:
        _gathered.futures = before
    torch.futures.wait_all(futures)


def serve_calls(agent: Agent) -> None:
    agent.serve(CALL, partial(_serve_call, agent))
    end_early()
    rpc: Any = getattr(torch._C, "_distributed_rpc", None)
    if rpc is not None:
        # Profiles show it as the node of an event.
        rpc._set_profiler_node_id(agent.rank)


def result_of(call: Call, *, original: bool = False) -> Any:
    """Return the result of a call that has ended, or raise its error; `original`: see rebuild_error."""
    if call.reply is not None:
        return unpack(call.reply, Incoming(call.rank, call.agent.rrefs))
    if call.failure is not None:
        raise rebuild_error(call.failure, original=original)
    if call.error is None:
        raise RpcError("This call has not ended.")
    raise call.error


def time_limit(agent: Agent, timeout: float) -> float:
    """Return the seconds that a call made now may take; 0: no limit. Raises: ValueError for anything but a number."""
    return agent.timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout("timeout", timeout)


def prepare_call(
    agent: Agent,
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> tuple[int, Packed, float]:
    """Return the rank of a call's destination, the call as it travels, and its time limit. Raises: see rpc_async."""
    rank = agent.worker(to).id
    limit = time_limit(agent, timeout)
    if not callable(func):
        raise WrongTypeError("function should be callable.")
    outgoing = Outgoing(
        rank,
        cloudpickle=agent.options.cloudpickle,
        context=this_thread.context,
        about=func,
        records=torch.is_grad_enabled(),
        device_map=agent.devices.requests.get(rank, {}),
        what=f"ServedRequest to {agent.workers[rank].name}",
    )
    return rank, pack((func, tuple(args) if args else (), dict(kwargs) if kwargs else {}), outgoing), limit


def pack_answer(agent: Agent, request: ServedRequest, value: Any) -> Packed:
    """Return a value as it travels to the caller of a request, in the request's context. Raises: what pickle raises."""
    if agent.ended is not None:
        # The function has outlived its session: an RRef of a later one would wait for an answer that is never sent.
        raise RpcError(agent.ended)
    outgoing = Outgoing(
        request.source,
        cloudpickle=agent.options.cloudpickle,
        context=request.packed.context,
        about=request.about,
        device_map=agent.devices.replies.get(request.source, {}),
        what=f"Response to {agent.workers[request.source].name}",
    )
    return pack(value, outgoing)


def run_when_confirmed(
    agent: Agent,
    request: ServedRequest,
    rrefs: Sequence[Any],
    function: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    answer: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Run the function of a request as soon as the owners of the RRefs among its arguments know of them."""
    func, args, kwargs = function
    if agent.is_recorded:
        func = recorded_request(agent, request, func)
    request.answers_last = not is_async(func)
    start = partial(run, func, args, kwargs, answer, fail)
    if rrefs:
        agent.when_confirmed(rrefs, bind_context(request.packed.context, start))
    else:
        start()


def _sync(agent: Agent, *call: Any) -> Any:
    rank, packed, limit = prepare_call(agent, *call)
    return result_of(agent.request(rank, CALL, packed, timeout=limit))


def _async(agent: Agent, promise: Promise, ended: Callable[[Exception | None], None] | None, *call: Any) -> None:
    then: Callable[[Call], None] = partial(_fulfil, promise, ended)
    if this_thread.context != NO_CONTEXT or not torch.is_grad_enabled():
        then = bind_caller(then)
    rank, packed, limit = prepare_call(agent, *call)
    agent.request(rank, CALL, packed, timeout=limit, then=then)
    if _gathered.futures is not None:
        _gathered.futures.append(promise.future)


def _fulfil(promise: Promise, ended: Callable[[Exception | None], None] | None, call: Call) -> None:
    error = None
    try:
        value = result_of(call)
    except Exception as caught:
        error = caught
    # Outside of the except block: what the user's callbacks raise in there must not be chained to this error.
    if ended is not None:
        ended(error)
    if error is None:
        promise.set_result(value)
    else:
        promise.set_error(error)


def _serve_call(agent: Agent, request: ServedRequest) -> None:
    """Serve a call. In a pool thread."""
    incoming = Incoming(request.source, agent.rrefs)
    function = unpack(request.packed, incoming)
    request.about = function[0]
    run_when_confirmed(agent, request, incoming.rrefs, function, partial(_answer, agent, request), request.answer)


def _answer(agent: Agent, request: ServedRequest, value: Any) -> None:
    result: Packed | Exception
    try:
        result = pack_answer(agent, request, value)
    except Exception as error:
        result = not_sent("The result", error)
    request.answer(result)


def not_sent(what: str, error: Exception) -> Exception:
    """What a caller gets whose answer cannot be packed; where a lost worker is why, it is told of that one."""
    text = f"{what} cannot be sent: {type(error).__name__}: {error}"
    failure = WorkerLostError(text, error.ranks) if isinstance(error, WorkerLostError) else RuntimeError(text)
    failure.__cause__ = error
    return failure
