"""The RRefs of this worker in an RPC session: the lifetime protocol with a lock, serving others, statistics.

A request to create a value (remote) carries the names of the RRef and of the creator's fork before the call. It is
answered when the function has ended: an exception stays with the value and is raised where that is used. A request to
copy a value (to_here) names the RRef. The loop takes it, before the notice that the fork is deleted can come. While the
value is computed, the request waits in the owner's table and holds no thread.

Lock order: the session's lock is the innermost; no user code runs and no message is sent under it. One thread can take
it twice, because the garbage collector may run a user's finalizer anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hvlike.errors import RpcError
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.calls import not_sent, pack_answer, run_when_confirmed
from hvlike.rpc.rrefs.lifetime import (
    DROPPED,
    NOTICES,
    Fork,
    GlobalId,
    Lifetime,
    OwnedValue,
)
from hvlike.rpc.wire.autograd_hooks import autograd_hooks
from hvlike.rpc.wire.message import FETCH, REMOTE, Packed, ServedRequest, describe_error, function_name
from hvlike.rpc.wire.pickler import Incoming, discard, unpack
from hvlike.system.system import of_process, system

R = TypeVar("R")


@dataclass(frozen=True)
class LiveRRef:
    """A value that this worker keeps because other workers may ask for it."""

    id: GlobalId
    """Name of the RRef: the rank that made it, and that rank's counter."""
    owner: str
    """Name of this worker."""
    creator: str
    """Name of the worker that called remote() or RRef()."""
    what: str
    """The function that makes the value; for RRef(value) the type of the value."""
    settled: bool
    """False while the value is computed."""
    forks: int
    """How many RRefs of other workers the owner knows of."""
    holders: tuple[str, ...]
    """The names of the workers that hold them."""

    def __str__(self) -> str:
        made = f"{self.what or 'a value still unknown'}, made for {self.creator}"
        held = f"held by {', '.join(self.holders)} ({self.forks} in all)" if self.holders else "still computed"
        return f"{self.id} on {self.owner} ({made}): {held}"


class RRefSession:
    """Takes the events of RRefs on this worker and carries out what follows from them. From any thread."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.rank = agent.rank
        self.lifetime = Lifetime(agent.rank)
        self.is_over = False  # True from shutdown on: RRefs of this session cannot be used any more
        self._lock = system.RLock()
        for kind in NOTICES:
            agent.hear(kind, partial(self._hear, kind))
        agent.when_confirmed = self.when_confirmed
        agent.when_lost.append(self._forget)
        agent.rrefs, agent.unwanted = self, self._drop_reply

    def perform(self, event: Callable[..., R], *args: Any, in_loop: bool = False) -> R:
        """Let the protocol take an event, and carry out what follows. In the loop no user code runs."""
        with self._lock:
            result = event(*args)
            effects = self.lifetime.take_effects()
        for notice in effects.notices:
            self.agent.notify(*notice)
        for start in effects.starts:
            self.agent.submit(start, limited=True)
        for answer in effects.answers:
            if in_loop:
                self.agent.submit(answer)
            else:
                answer()
        if in_loop and effects.freed:
            self.agent.submit(effects.freed.clear)
        return result

    def _hear(self, kind: int, source: int, value: tuple[Any, ...], _: object) -> None:
        self.perform(self.lifetime.hear, kind, source, value, in_loop=True)

    def _forget(self, rank: int, failure: Exception) -> None:
        self.perform(self.lifetime.forget, rank, failure, in_loop=True)

    def finalize(self, fork: Fork) -> None:
        """The RRef object of this fork is gone. Safe in a finalizer: only queues a notice."""
        if not self.is_over:
            self.agent.notify(self.rank, DROPPED, (tuple(fork.id),))

    def when_confirmed(self, rrefs: Sequence[Any], then: Callable[[], None]) -> None:
        """Call `then` when the owners of these RRefs know of them: now, or in a pool thread. Does not block."""
        forks = [rref.held for rref in rrefs if isinstance(rref.held, Fork)]
        if all(fork.confirmed for fork in forks) or self.perform(self.lifetime.when_confirmed, forks, then):
            then()

    def when_settled(self, entry: OwnedValue, then: Callable[[], None]) -> None:
        """Call `then` when the entry is settled: now, or in the thread that settles it."""
        if entry.settled:
            then()
        else:
            self.perform(self.lifetime.when_settled, entry, then)

    def wait(self, entry: OwnedValue, seconds: float | None = None) -> bool:
        """Block until the entry is settled; False if the time was over before."""
        if entry.settled:
            return True
        settled = system.Event()
        self.when_settled(entry, settled.set)
        return settled.wait(seconds)

    def settle(self, entry: OwnedValue, value: Any = None, failure: Any = None) -> None:
        """The value is computed, or will never be. In the thread that computed it."""
        if failure is None:
            entry.events = self.agent.devices.ready_events()
        self.perform(self.lifetime.settle, entry, value, failure)

    def local(self, value: Any) -> OwnedValue:
        """Return the entry of a value that exists; it is in no table before it is sent."""
        events = self.agent.devices.ready_events()
        return OwnedValue(self.lifetime.new_id(), created=True, settled=True, value=value, events=events)

    def end(self) -> None:
        """From now on RRefs of this session raise, and values that are not computed will never be."""
        self.is_over = True
        _process.session = None
        failure = RpcError(f"RPC has been shut down on {self.agent.me.name} before the value of this RRef was there.")
        self.perform(self.lifetime.end, failure)

    def live(self) -> list[LiveRRef]:
        with self._lock:
            return [self._describe(entry) for _, entry in sorted(self.lifetime.owned.items())]

    def debug_info(self) -> dict[str, str]:
        """Return counts under torch's names; num_user_rrefs is hvlike's own."""
        with self._lock:
            entries = list(self.lifetime.owned.values())
            forks = list(self.lifetime.forks.values())
            return {
                "num_owner_rrefs": str(len(entries)),
                "num_forks": str(sum(len(entry.holders) for entry in entries)),
                "num_pending_users": str(sum(not fork.confirmed for fork in forks)),
                "num_user_rrefs": str(len(forks)),
                "num_pending_futures": str(sum(len(entry.waiting) for entry in entries)),
            }

    def _drop_reply(self, source: int, packed: Packed) -> None:
        """Drop a reply whose call has ended without it: release its RRefs; no gradients will come for its tensors."""
        if packed.note is not None:
            autograd_hooks().unwanted(packed.note, source)
        discard(packed, Incoming(source, self))

    def _describe(self, entry: OwnedValue) -> LiveRRef:
        workers = self.agent.workers
        what = entry.what
        if not what and entry.settled:
            what = f"{type(entry.value).__module__}.{type(entry.value).__qualname__}"
        holders = [rank for rank in entry.holders.values() if rank != self.rank]
        return LiveRRef(
            id=entry.id,
            owner=self.agent.me.name,
            creator=workers[entry.id.created_on].name,
            what=what,
            settled=entry.settled,
            forks=len(holders),
            holders=tuple(workers[rank].name for rank in sorted(set(holders))),
        )


class _CurrentSession:
    def __init__(self) -> None:
        self.session: RRefSession | None = None
        self.checks_leaks = False


_process = of_process(_CurrentSession)


def current_session() -> RRefSession:
    """Return the running session. Raises: RuntimeError before init_rpc and after shutdown."""
    session = _process.session
    if session is None:
        raise RpcError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return session


def live_rrefs() -> list[LiveRRef]:
    """Return the values that this worker keeps for others; empty outside of a session."""
    return _process.session.live() if _process.session is not None else []


def set_leak_checking(on: bool) -> None:
    _process.checks_leaks = on


def checks_leaks() -> bool:
    return _process.checks_leaks


NAME = struct.Struct("<iq")  # The name of an RRef or a fork in a request
NO_FORK = GlobalId(-1, -1)  # In a request of the owner to itself
_DONE = Packed(b"", [])


def begin_rrefs(agent: Agent) -> None:
    """Begin the session of RRefs; the agent does not receive messages yet."""
    session = RRefSession(agent)
    agent.serve(REMOTE, partial(_create, session))
    agent.serve(FETCH, partial(_look_up, session), in_loop=True)
    _process.session = session


def _create(session: RRefSession, request: ServedRequest) -> None:
    """Serve remote(). In a pool thread."""
    body = request.packed.body
    rref, fork = (GlobalId(*NAME.unpack_from(body, start)) for start in (0, NAME.size))
    entry = session.perform(session.lifetime.create, rref, None if fork == NO_FORK else fork, request.source)
    fail = partial(_settle_failure, session, entry, request)
    incoming = Incoming(request.source, session)
    try:
        function = unpack(request.packed._replace(body=body[2 * NAME.size :]), incoming)
    except Exception as error:
        fail(error)
        return
    entry.what = request.about = function_name(function[0])
    answer = partial(_settle, session, entry, request)
    run_when_confirmed(session.agent, request, incoming.rrefs, function, answer, fail)


def _settle(session: RRefSession, entry: OwnedValue, request: ServedRequest, value: Any) -> None:
    session.settle(entry, value)
    request.answer(_DONE)


def _settle_failure(session: RRefSession, entry: OwnedValue, request: ServedRequest, error: BaseException) -> None:
    session.settle(entry, failure=describe_error(error, session.agent.me))
    request.answer(_DONE)


def _look_up(session: RRefSession, request: ServedRequest) -> None:
    """Serve to_here(). In the loop."""
    rref = GlobalId(*NAME.unpack(request.packed.body))
    request.about = f"to_here of {rref}"
    if request.packed.note is not None:
        autograd_hooks().came(request.packed.note, request.source, ())
    entry = session.perform(session.lifetime.find, rref, in_loop=True)
    session.perform(session.lifetime.when_settled, entry, partial(_send_copy, session, request, entry), in_loop=True)


def _send_copy(session: RRefSession, request: ServedRequest, entry: OwnedValue) -> None:
    if entry.failure is not None:
        request.answer(entry.failure)
        return
    try:
        entry.events.follow()
        packed = pack_answer(session.agent, request, entry.value)
    except Exception as error:
        request.answer(not_sent("The value of this RRef", error))
    else:
        request.answer(packed)
