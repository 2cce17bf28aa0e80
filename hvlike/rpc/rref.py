"""RRef: a reference to a value on one worker that all workers can hold, send on and use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from hvlike.errors import RpcError
from hvlike.rpc.constants import UNSET_RPC_TIMEOUT
from hvlike.rpc.devices.devices import follow
from hvlike.rpc.remote_error import Description, rebuild
from hvlike.rpc.rrefs import backward as backwards
from hvlike.rpc.rrefs import fetching, proxy, types
from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.session import Session, current
from hvlike.rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from hvlike.rpc.rrefs.creation import Creation

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

    session: Session
    held: Entry | Fork
    creation: Creation | None
    """The call that makes the value, on the worker that has asked for it."""
    type_future: torch.futures.Future[Any] | None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule | torch._C.ScriptModule):
            raise RpcError("type_hint should only be specified when the RRef being created contains a ScriptModule.")
        session = current()
        self._set(session, session.local(value), None)

    @classmethod
    def of(cls, session: Session, held: Entry | Fork, creation: Creation | None = None) -> RRef[T]:
        """The RRef object of an entry or of a new fork; for hvlike.rpc itself."""
        rref = cls.__new__(cls)
        rref._set(session, held, creation)
        return rref

    def _set(self, session: Session, held: Entry | Fork, creation: Creation | None) -> None:
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
            copied: T = fetching.fetch(self.session, held, timeout)
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
            raise rebuild(held.failure, original=True)
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
        return isinstance(self.held, Entry)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference; after remote() only when the function has ended there."""
        return isinstance(self.held, Entry) or self.held.confirmed

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
        found = types.find_type(self, timeout)
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
