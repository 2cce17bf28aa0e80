"""remote: have a worker make a value and keep it.

The request carries the names of the RRef and of the creator's fork before the call. It is answered when the function
has ended, however: an exception stays with the value and is raised where that is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hvlike.errors import RpcError
from hvlike.rpc import calls, contexts
from hvlike.rpc import rref as rref_module
from hvlike.rpc.agent import Agent
from hvlike.rpc.agent import current as current_agent
from hvlike.rpc.callables import name_of
from hvlike.rpc.constants import UNSET_RPC_TIMEOUT
from hvlike.rpc.functions import is_async, run
from hvlike.rpc.futures import Promise
from hvlike.rpc.message import REMOTE, Call, Packed, Request
from hvlike.rpc.pickler import Incoming, unpack
from hvlike.rpc.profiling import is_recorded, observed_remote, observed_request
from hvlike.rpc.remote_error import describe
from hvlike.rpc.rrefs.confirmation import when_confirmed
from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.identity import GlobalId
from hvlike.rpc.rrefs.session import Session
from hvlike.rpc.rrefs.session import current as current_session

_NAMES = struct.Struct("<iqiq")
_NO_FORK = (-1, -1)
_DONE = Packed(b"", [])


class Creation:
    """The call that makes a value, as the worker sees it that asked for it."""

    __slots__ = ("_promise", "ended", "error", "lock")

    def __init__(self, session: Session) -> None:
        self.lock = session.lock
        self.ended = False
        self.error: Exception | None = None
        """Why there was no acknowledgement."""
        self._promise: Promise | None = None

    def end(self, error: Exception | None) -> None:
        """The call has ended."""
        with self.lock:
            self.error, self.ended = error, True
            promise = self._promise
        if promise is not None:
            self._fulfil(promise)

    def future(self) -> torch.futures.Future[Any]:
        """Done when the call has ended."""
        with self.lock:
            if self._promise is None:
                self._promise = Promise()
                if self.ended:
                    self._fulfil(self._promise)
            return self._promise.future

    def check(self) -> None:
        """Raises: RuntimeError where the creation was not acknowledged."""
        if self.error is None:
            return
        if "RPC ran for more than" in str(self.error):
            raise RpcError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not "
                f"exist. {self.error}"
            )
        raise RpcError(f"RRef creation via rpc.remote() failed: {self.error}")

    def _fulfil(self, promise: Promise) -> None:
        if self.error is None:
            promise.set_result(None)
        else:
            promise.set_error(self.error)


def remote(
    to: calls.Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> rref_module.RRef[Any]:
    """Have a worker run func(*args, **kwargs) and keep the result; returns an RRef of that at once.

    to: name, rank or WorkerInfo; on this worker itself the RRef is the owner's. Arguments travel as for rpc_sync.
    timeout: seconds until the function must have ended there, 0 for none; the default of init_rpc otherwise. Once they
        are over the RRef can neither be fetched nor sent.
    Does not block; tensors among the arguments must not change before the RRef is confirmed_by_owner().
    Raises: at once what rpc_sync raises for arguments; an error of the function where the value is used.
    Source: torch.distributed.rpc.remote.
    """
    agent = current_agent()
    if is_recorded(agent.fabric.recorder):
        return observed_remote(agent, _remote, to, func, args, kwargs, timeout)
    return _remote(agent, to, func, args, kwargs, timeout)


def serve(session: Session) -> None:
    """Have this worker make values for others."""
    session.agent.serve(REMOTE, partial(_create, session))


def _remote(
    agent: Agent,
    to: calls.Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> rref_module.RRef[Any]:
    session = current_session()
    rank = agent.worker(to).id
    limit = calls.seconds(agent, timeout)
    packed = calls.packed_call(agent, rank, func, args, kwargs)
    lifetime = session.lifetime
    rref = lifetime.new_id()
    creation = Creation(session)
    held: Entry | Fork
    if rank == session.rank:
        held = session.perform(lifetime.create, rref, None, rank)
        names = _NAMES.pack(*rref, *_NO_FORK)
    else:
        held = Fork(rref, lifetime.new_id(), rank)
        session.perform(lifetime.used.begin, held)
        names = _NAMES.pack(*rref, *held.id)
    then = partial(_acknowledge, session, held, creation)
    agent.request(rank, REMOTE, packed._replace(body=names + packed.body), timeout=limit, then=then)
    return rref_module.RRef.of(session, held, creation)


def _acknowledge(session: Session, held: Entry | Fork, creation: Creation, call: Call) -> None:
    creation.end(call.error)
    if isinstance(held, Fork):
        session.perform(session.lifetime.used.confirm, held)


def _create(session: Session, request: Request) -> None:
    """Serve a creation: in a thread of its own time."""
    body = request.packed.body
    numbers = _NAMES.unpack_from(body)
    rref, fork = GlobalId(*numbers[:2]), GlobalId(*numbers[2:])
    entry = session.perform(session.lifetime.create, rref, None if fork == _NO_FORK else fork, request.source)
    fail = partial(_fail, session, request, entry)
    incoming = Incoming(request.source)
    try:
        func, args, kwargs = unpack(request.packed._replace(body=body[_NAMES.size :]), incoming)
    except Exception as error:
        fail(error)
        return
    entry.what = request.about = name_of(func)
    if is_recorded(session.agent.fabric.recorder):
        request, func = observed_request(session.agent, request, func, args)
        fail = partial(_fail, session, request, entry)
    request.answers_last = not is_async(func)
    answer = partial(_settle, session, request, entry)
    start = partial(run, func, args, kwargs, answer, fail)
    when_confirmed(incoming.rrefs, contexts.carried(request.packed.context, start))


def _settle(session: Session, request: Request, entry: Entry, value: Any) -> None:
    session.settle(entry, value)
    request.answer(_DONE)


def _fail(session: Session, request: Request, entry: Entry, error: BaseException) -> None:
    session.settle(entry, failure=describe(error, session.agent.me))
    request.answer(_DONE)
