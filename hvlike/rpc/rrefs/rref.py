"""RRef: a reference to a value on one worker that all workers can hold, send on and use. Also remote() and to_here().

A request to create a value carries the names of the RRef and of the creator's fork before the call. It is answered when
the function has ended: an exception stays with the value and is raised where that is used. A request to copy a value
names the RRef and the fork it is made through, and the owner counts it. While the value is computed, the request waits
in the owner's table and holds no thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch

from hvlike.errors import RpcError
from hvlike.rpc.agent import calls
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.agent import current_agent as current_agent
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.agent.profiling import is_recorded, observed_remote, observed_request
from hvlike.rpc.constants import UNSET_RPC_TIMEOUT
from hvlike.rpc.functions import is_async, run
from hvlike.rpc.rrefs import proxy
from hvlike.rpc.rrefs import proxy as backwards
from hvlike.rpc.rrefs.records import Fork, GlobalId, OwnedValue
from hvlike.rpc.rrefs.session import RRefSession, when_confirmed
from hvlike.rpc.rrefs.session import current_session as current_session
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.devices import follow
from hvlike.rpc.wire.message import (
    FETCH,
    REMOTE,
    Call,
    Description,
    Packed,
    Request,
    WorkerInfo,
    describe_error,
    rebuild_error,
)
from hvlike.rpc.wire.pickler import Incoming, unpack
from hvlike.rpc.wire.reducers import function_name

_NAMES = struct.Struct("<iqiq")


def fetch(session: RRefSession, fork: Fork, timeout: float) -> Any:
    """A copy of the value on the owner of `fork`, which the caller holds. Blocks."""
    agent = session.agent
    limit = calls.time_limit(agent, timeout)
    session.perform(session.lifetime.used.fetch, fork)
    names = Packed(_NAMES.pack(*fork.rref, *fork.id), [], autograd_hooks.note_to(fork.owner, "to_here"))
    call = agent.request(fork.owner, FETCH, names, timeout=limit, now=False)
    agent.wait(call)
    return calls.result_of(agent, call, original=True)


def serve_fetches(session: RRefSession) -> None:
    """Have this worker send its values to those who hold RRefs of them."""
    # No function of a caller runs here: workers whose threads all wait for values of each other still get them.
    session.agent.serve(FETCH, partial(_look_up, session), limited=False)


def _look_up(session: RRefSession, request: Request) -> None:
    numbers = _NAMES.unpack(request.packed.body)
    rref, fork = GlobalId(*numbers[:2]), GlobalId(*numbers[2:])
    request.about = f"to_here of {rref}"
    if request.packed.note is not None:
        autograd_hooks.autograd_hooks().came(request.packed.note, request.source, ())
    entry = session.perform(session.lifetime.owned.fetched, rref, fork, request.source)
    session.when_settled(entry, partial(_answer_fetch, session, request, entry))


def _answer_fetch(session: RRefSession, request: Request, entry: OwnedValue) -> None:
    if entry.failure is not None:
        request.fail(entry.failure)
        return
    try:
        follow(entry.marks)
        packed = calls.pack_answer(session.agent, request, entry.value)
    except Exception as error:
        request.fail(RuntimeError(f"The value of this RRef cannot be sent: {type(error).__name__}: {error}"))
    else:
        request.answer(packed)


_NO_FORK = (-1, -1)
_DONE = Packed(b"", [])


class Creation:
    """The call that makes a value, as the worker sees it that asked for it."""

    __slots__ = ("_promise", "ended", "error", "lock")

    def __init__(self, session: RRefSession) -> None:
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
) -> RRef[Any]:
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


def serve_creations(session: RRefSession) -> None:
    """Have this worker make values for others."""
    session.agent.serve(REMOTE, partial(_create, session))


def _remote(
    agent: Agent,
    to: calls.Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> RRef[Any]:
    session = current_session()
    rank = agent.worker(to).id
    limit = calls.time_limit(agent, timeout)
    packed = calls.pack_call(agent, rank, func, args, kwargs)
    lifetime = session.lifetime
    rref = lifetime.new_id()
    creation = Creation(session)
    held: OwnedValue | Fork
    if rank == session.rank:
        held = session.perform(lifetime.create, rref, None, rank)
        names = _NAMES.pack(*rref, *_NO_FORK)
    else:
        held = Fork(rref, lifetime.new_id(), rank)
        session.perform(lifetime.used.begin, held)
        names = _NAMES.pack(*rref, *held.id)
    then = partial(_acknowledge, session, held, creation)
    agent.request(rank, REMOTE, packed._replace(body=names + packed.body), timeout=limit, then=then)
    return RRef.of(session, held, creation)


def _acknowledge(session: RRefSession, held: OwnedValue | Fork, creation: Creation, call: Call) -> None:
    creation.end(call.error)
    if isinstance(held, Fork):
        session.perform(session.lifetime.used.confirm, held)


def _create(session: RRefSession, request: Request) -> None:
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
    entry.what = request.about = function_name(func)
    if is_recorded(session.agent.fabric.recorder):
        request, func = observed_request(session.agent, request, func, args)
        fail = partial(_fail, session, request, entry)
    request.answers_last = not is_async(func)
    answer = partial(_settle, session, request, entry)
    start = partial(run, func, args, kwargs, answer, fail)
    when_confirmed(incoming.rrefs, autograd_hooks.bind_context(request.packed.context, start))


def _settle(session: RRefSession, request: Request, entry: OwnedValue, value: Any) -> None:
    session.settle(entry, value)
    request.answer(_DONE)


def _fail(session: RRefSession, request: Request, entry: OwnedValue, error: BaseException) -> None:
    session.settle(entry, failure=describe_error(error, session.agent.me))
    request.answer(_DONE)


T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on one worker, its owner.

    RRef(value) makes this worker the owner of value; `remote` makes another one. RRefs travel as arguments and results
    of RPC, inside containers too, and nowhere else. On its owner an RRef leads to the value itself, on any other worker
    (a user) it copies it. The owner keeps the value while any worker has an RRef of it.

    type_hint: accepted for torch's sake, with a ScriptModule only.
    Raises: RuntimeError outside of a session of RPC.
    Source: torch.distributed.rpc.RRef.
    """

    __slots__ = ("__weakref__", "creation", "held", "session", "type_future")

    session: RRefSession
    held: OwnedValue | Fork
    creation: Creation | None
    """The call that makes the value, on the worker that has asked for it."""
    type_future: torch.futures.Future[Any] | None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule | torch._C.ScriptModule):
            raise RpcError("type_hint should only be specified when the RRef being created contains a ScriptModule.")
        session = current_session()
        self._set(session, session.local(value), None)

    @classmethod
    def of(cls, session: RRefSession, held: OwnedValue | Fork, creation: Creation | None = None) -> RRef[T]:
        """The RRef object of an entry or of a new fork; for hvlike.rpc itself."""
        rref = cls.__new__(cls)
        rref._set(session, held, creation)
        return rref

    def _set(self, session: RRefSession, held: OwnedValue | Fork, creation: Creation | None) -> None:
        self.session, self.held, self.creation, self.type_future = session, held, creation, None

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A new copy of the value; on the owner the value itself. Blocks until there is one.

        timeout: seconds, 0 for none; otherwise the default of RPC, on the owner none.
        Raises: the exception of the function that was to make the value, of its own class if possible; RuntimeError
            when the time is over, when the creation was not acknowledged in its time, and after shutdown.
        """
        held = self.held
        if self.creation is not None:
            self.creation.check()
        if isinstance(held, Fork):
            if held.dropped or self.session.is_over:
                raise RpcError(f"{self.name} has been deleted. Cannot call to_here() on it after deletion.")
            copied: T = fetch(self.session, held, timeout)
            return copied
        if timeout > 0 and not self.session.wait(held, timeout):
            raise RpcError(
                f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms): {self.name} has no value yet."
            )
        return self.local_value()

    def local_value(self) -> T:
        """The value itself, on its owner. Blocks until it is there.

        Raises: RuntimeError on a user; the exception of the function that was to make the value.
        """
        held = self.held
        if isinstance(held, Fork):
            raise RpcError(
                f"For {self.name}, can't call localValue() on user {self.session.agent.me}. "
                f"Call it on owner {self.owner()}"
            )
        self.session.wait(held)
        if isinstance(held.failure, Description):
            raise rebuild_error(held.failure, original=True)
        if held.failure is not None:
            raise held.failure
        follow(held.marks)
        value: T = held.value
        return value

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        held = self.held
        return self.session.agent.workers[held.owner if isinstance(held, Fork) else self.session.rank]

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return isinstance(self.held, OwnedValue)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference; after remote() only when the function has ended there."""
        return isinstance(self.held, OwnedValue) or self.held.confirmed

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_sync().method(*args)` runs the method on the owner and returns its result.

        timeout: seconds for each call, with the question for the value's type that comes before it.
        """
        return proxy.sync_proxy(self, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_async().method(*args)` runs the method on the owner and returns a future."""
        return proxy.async_proxy(self, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.remote().method(*args)` runs the method on the owner and returns an RRef of its result."""
        return proxy.remote_proxy(self, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, a tensor: hvlike.autograd.backward on its owner, which this call waits for.

        Without a context id: ordinary autograd, on the owner only.
        Raises: RuntimeError on a user without a context id, for a value that is no tensor, for an unknown context;
            what hvlike.autograd.backward raises.
        """
        backwards.backward(self, dist_autograd_ctx_id, retain_graph)

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.held) if isinstance(self.held, Fork) else str(self)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it; asks the owner once."""
        found = proxy.find_type(self, timeout)
        return found.wait() if blocking else found

    def _get_future(self) -> torch.futures.Future[Any]:
        """A future that is done when the owner has acknowledged the creation."""
        if self.creation is None:
            raise RpcError(f"{self.name} was not created by remote() on this worker, there is nothing to wait for.")
        return self.creation.future()

    def __repr__(self) -> str:
        held = self.held
        if isinstance(held, Fork):
            return f"UserRRef(RRefId = {held.rref}, ForkId = {held.id})"
        return f"OwnerRRef({held.id})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RpcError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __del__(self) -> None:
        held = getattr(self, "held", None)
        if isinstance(held, Fork):
            self.session.finalise(held)
