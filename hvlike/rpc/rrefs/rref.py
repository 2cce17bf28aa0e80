"""RRef, a reference to a value on one worker that all workers can hold, send on and use; and remote()."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch

from hvlike.errors import RpcError, WorkerLostError
from hvlike.rpc.agent.agent import Agent, Call, current_agent
from hvlike.rpc.agent.calls import Destination, prepare_call, result_of, rpc_async, rpc_sync, time_limit
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.agent.options import UNSET_RPC_TIMEOUT
from hvlike.rpc.agent.profiling import recorded_call
from hvlike.rpc.rrefs.lifetime import Fork, OwnedValue, Ticket
from hvlike.rpc.rrefs.proxy import Proxy, backward, find_type
from hvlike.rpc.rrefs.session import NAME, NO_FORK, RRefSession, current_session
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, autograd_hooks, this_thread
from hvlike.rpc.wire.message import FETCH, REMOTE, Description, Packed, WorkerInfo, rebuild_error
from hvlike.rpc.wire.pickler import Incoming, Outgoing, carry_ahead

T = TypeVar("T")


class Creation:
    """The call that makes a value, on the worker that made it."""

    __slots__ = ("error", "promise")

    def __init__(self) -> None:
        self.error: Exception | None = None  # Why the owner has not acknowledged it
        self.promise = Promise()

    def end(self, error: Exception | None) -> None:
        self.error = error
        if error is None:
            self.promise.set_result(None)
        else:
            self.promise.set_error(error)

    def check(self) -> None:
        if self.error is None:
            return
        if "RPC ran for more than" in str(self.error):
            raise RpcError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not "
                f"exist. {self.error}"
            )
        text = f"RRef creation via rpc.remote() failed: {self.error}"
        raise WorkerLostError(text, self.error.ranks) if isinstance(self.error, WorkerLostError) else RpcError(text)


class RRef(Generic[T]):
    """A reference to a value on one worker, its owner.

    RRef(value) makes this worker the owner of the value; `remote` makes another worker the owner. RRefs travel as
    arguments and results of RPC, inside containers too, and nowhere else. On its owner an RRef gives access to the
    value itself, on any other worker (a user) to a copy. The owner keeps the value while any worker has an RRef of it.

    Args:
        value: The value, any object.
        type_hint: Accepted for compatibility with torch; only with a ScriptModule.

    Raises:
        RuntimeError: Outside of a session.

    Example:
        counter = rpc.remote("worker1", Counter)
        counter.rpc_sync().add(2)
        total = counter.rpc_sync().read()

    Source: torch.distributed.rpc.RRef.
    """

    __slots__ = ("__weakref__", "creation", "held", "session", "type_future")

    session: RRefSession
    held: OwnedValue | Fork
    creation: Creation | None  # The call that makes the value, on the worker that called remote()
    type_future: torch.futures.Future[Any] | None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule | torch._C.ScriptModule):
            raise RpcError("type_hint should only be specified when the RRef being created contains a ScriptModule.")
        session = current_session()
        self._set(session, session.local(value), None)

    @classmethod
    def _of(cls, session: RRefSession, held: OwnedValue | Fork, creation: Creation | None = None) -> RRef[T]:
        rref = cls.__new__(cls)
        rref._set(session, held, creation)
        return rref

    def _set(self, session: RRefSession, held: OwnedValue | Fork, creation: Creation | None) -> None:
        self.session, self.held, self.creation, self.type_future = session, held, creation, None

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return a new copy of the value, or on the owner the value itself. Blocks until it is computed.

        Args:
            timeout: Seconds; 0: no limit; default: that of init_rpc, and no limit on the owner.

        Returns:
            The value or its copy.

        Raises:
            RuntimeError: When the time is over, if the creation was not acknowledged in its time, and after shutdown.
            Exception: The exception of the function that was to make the value, of its own class if possible.
        """
        held = self.held
        if self.creation is not None:
            self.creation.check()
        if isinstance(held, Fork):
            if held.dropped or self.session.is_over:
                raise RpcError(f"{self.name} has been deleted. Cannot call to_here() on it after deletion.")
            copied: T = _fetch(self.session, held, timeout)
            return copied
        if timeout > 0 and not self.session.wait(held, timeout):
            raise RpcError(
                f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms): {self.name} has no value yet."
            )
        return self.local_value()

    def local_value(self) -> T:
        """Return the value itself, on its owner. Blocks until it is computed.

        Raises:
            RuntimeError: On a user.
            Exception: The exception of the function that was to make the value.
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
        held.events.follow()
        value: T = held.value
        return value

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        held = self.held
        return self.session.agent.workers[held.owner if isinstance(held, Fork) else self.session.rank]

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Return whether this worker has the value."""
        return isinstance(self.held, OwnedValue)

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner knows of this reference; after remote() not before the function has ended there."""
        return isinstance(self.held, OwnedValue) or self.held.confirmed

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: `rref.rpc_sync().method(*args)` runs the method on the owner and returns its result.

        Args:
            timeout: Seconds for each call, including the look-up of the value's type; 0: no limit.

        Returns:
            The proxy.
        """
        return Proxy(self, rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: `rref.rpc_async().method(*args)` runs the method on the owner and returns a future.

        Args:
            timeout: Seconds for each call, including the look-up of the value's type; 0: no limit.

        Returns:
            The proxy.
        """
        return Proxy(self, rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: `rref.remote().method(*args)` runs the method on the owner and returns an RRef of the result.

        Args:
            timeout: Seconds for each call, including the look-up of the value's type; 0: no limit.

        Returns:
            The proxy.
        """
        return Proxy(self, remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run hvlike.autograd.backward on the owner, from the value, a tensor. Blocks.

        Args:
            dist_autograd_ctx_id: Id of the context. Default: ordinary autograd, on the owner only.
            retain_graph: Keep the graph for another backward.

        Raises:
            RuntimeError: On a user without a context id, for a value that is no tensor, for an unknown context, and
                what hvlike.autograd.backward raises.
        """
        backward(self, dist_autograd_ctx_id, retain_graph)

    @property
    def name(self) -> str:
        """The name in messages."""
        return str(self.held) if isinstance(self.held, Fork) else str(self)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a future of it; asks the owner once."""
        found = find_type(self, timeout)
        return found.wait() if blocking else found

    def _get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when the owner has acknowledged the creation."""
        if self.creation is None:
            raise RpcError(f"{self.name} was not created by remote() on this worker, there is nothing to wait for.")
        return self.creation.promise.future

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
            self.session.finalize(held)


def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Let a worker run `func(*args, **kwargs)` and keep the result. Does not block.

    Tensors among the arguments must not change before the RRef is confirmed_by_owner().

    Args:
        to: Name, rank or WorkerInfo of the worker; this worker too.
        func: A function that both workers can import; it travels by its name.
        args: Positional arguments. They travel as pickle copies them, tensors out of band.
        kwargs: Keyword arguments, likewise.
        timeout: Seconds until the function must have ended there; 0: no limit; default: that of init_rpc. After that
            the RRef can neither be fetched nor sent.

    Returns:
        An RRef of the result, at once. An exception of the function is raised where the value is used.

    Raises:
        RuntimeError: Outside of a session, and for an unknown worker.
        TypeError: `func` cannot be called.
        Exception: What pickle raises for arguments that it cannot copy.

    Example:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        total = rref.to_here()

    Source: torch.distributed.rpc.remote.
    """
    agent = current_agent()
    if agent.is_recorded:
        rref: RRef[Any] = recorded_call(agent, "remote", _remote, to, func, args, kwargs, timeout)
        return rref
    return _remote(agent, to, func, args, kwargs, timeout)


def _remote(agent: Agent, *call: Any) -> RRef[Any]:
    session = current_session()
    rank, packed, limit = prepare_call(agent, *call)
    lifetime = session.lifetime
    rref = lifetime.new_id()
    creation = Creation()
    held: OwnedValue | Fork
    if rank == session.rank:
        held = session.perform(lifetime.create, rref, None, rank)
        fork = NO_FORK
    else:
        held = Fork(rref, lifetime.new_id(), rank)
        session.perform(lifetime.begin, held)
        fork = held.id
    names = NAME.pack(*rref) + NAME.pack(*fork)
    then = partial(_acknowledge, session, held, creation)
    agent.request(rank, REMOTE, packed._replace(body=names + packed.body), timeout=limit, then=then)
    return RRef._of(session, held, creation)


def _acknowledge(session: RRefSession, held: OwnedValue | Fork, creation: Creation, call: Call) -> None:
    creation.end(call.error)
    if isinstance(held, Fork):
        session.perform(session.lifetime.confirm, held)


def _fetch(session: RRefSession, fork: Fork, timeout: float) -> Any:
    """Return a copy of the value from the owner of the fork. Blocks."""
    agent = session.agent
    limit = time_limit(agent, timeout)
    context = this_thread.context
    note = None if context == NO_CONTEXT else autograd_hooks().sent(context, fork.owner, "to_here", ())
    name = Packed(NAME.pack(*fork.rref), [], note)
    return result_of(agent.request(fork.owner, FETCH, name, timeout=limit), original=True)


def _reduce(rref: RRef[Any], outgoing: Outgoing) -> tuple[int, ...]:
    """Return the numbers by which an RRef travels. Raises: RuntimeError for one that cannot be sent any more."""
    session, held = rref.session, rref.held
    if session.is_over or (isinstance(held, Fork) and held.dropped):
        raise RpcError(f"{rref.name} has been deleted. Cannot call fork an UserRRef after deletion.")
    if rref.creation is not None:
        rref.creation.check()
    ticket = session.perform(session.lifetime.send, held, outgoing.destination)
    outgoing.undo.append(partial(session.perform, session.lifetime.unsend, held, ticket))
    return ticket.pack()


def _restore(numbers: tuple[int, ...], incoming: Incoming) -> RRef[Any]:
    session = incoming.session
    held = session.perform(session.lifetime.receive, Ticket.unpack(numbers), incoming.source)
    rref: RRef[Any] = RRef._of(session, held)
    incoming.rrefs.append(rref)
    return rref


carry_ahead(RRef, _reduce, _restore)
