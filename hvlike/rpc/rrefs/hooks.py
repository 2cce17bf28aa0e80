"""What RRefs add to an RPC session: how they travel in messages, what is alive, and the hooks of init_rpc and
shutdown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hvlike.errors import RpcError
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.rrefs import rref
from hvlike.rpc.rrefs import rref as rref_module
from hvlike.rpc.rrefs import session as sessions
from hvlike.rpc.rrefs.records import Fork, GlobalId, OwnedValue, Ticket
from hvlike.rpc.rrefs.session import RRefSession, current_session
from hvlike.rpc.wire import autograd_hooks
from hvlike.rpc.wire.message import CALL, FETCH, Packed
from hvlike.rpc.wire.pickler import Incoming, Outgoing, carry_ahead, discard


def reduce_rref(rref: rref_module.RRef[Any], outgoing: Outgoing) -> tuple[int, ...]:
    """The numbers by which `rref` travels. Raises: RuntimeError for one that cannot be sent any more."""
    session, held = rref.session, rref.held
    if session.is_over or (isinstance(held, Fork) and held.dropped):
        raise RpcError(f"{rref.name} has been deleted. Cannot call fork an UserRRef after deletion.")
    if rref.creation is not None:
        rref.creation.check()
    ticket = session.perform(session.lifetime.send, held, outgoing.destination)
    outgoing.undo.append(partial(session.perform, session.lifetime.unsend, held, ticket))
    return ticket.pack()


def restore_rref(numbers: tuple[int, ...], incoming: Incoming) -> rref_module.RRef[Any]:
    """The RRef that has travelled as these numbers: the owner's own on its owner, a new fork elsewhere."""
    session = current_session()
    held = session.perform(session.lifetime.receive, Ticket.unpack(numbers), incoming.source)
    rref: rref_module.RRef[Any] = rref_module.RRef.of(session, held)
    incoming.rrefs.append(rref)
    return rref


def discard_answer(kind: int, source: int, packed: Packed) -> None:
    """The answer to a call that has ended without it: its RRefs are dropped, no gradients will come for its tensors."""
    if packed.note is not None:
        autograd_hooks.autograd_hooks().unwanted(packed.note, source)
    if kind in (CALL, FETCH):
        discard(packed, Incoming(source))


def register_pickling() -> None:
    """Let the pickler know."""
    carry_ahead(rref_module.RRef, reduce_rref, restore_rref)


@dataclass(frozen=True)
class LiveRRef:
    """A value that this worker keeps because others may ask for it."""

    id: GlobalId
    owner: str
    creator: str
    """The worker that called remote() or RRef()."""
    what: str
    """The function that makes the value; for RRef(value) the type of the value."""
    settled: bool
    """False while the value is computed."""
    forks: int
    """How many RRefs of other workers the owner knows of."""
    holders: tuple[str, ...]
    """The workers that have them."""

    def __str__(self) -> str:
        made = f"{self.what or 'a value still unknown'}, made for {self.creator}"
        held = f"held by {', '.join(self.holders)} ({self.forks} in all)" if self.holders else "still computed"
        return f"{self.id} on {self.owner} ({made}): {held}"


def live_in(session: RRefSession) -> list[LiveRRef]:
    """The values in this worker's table, in the order of their names."""
    with session.lock:
        entries = sorted(session.lifetime.owned.entries.values(), key=lambda entry: entry.id)
        return [_describe_value(session, entry) for entry in entries]


def debug_info_of(session: RRefSession) -> dict[str, str]:
    """Counts under torch's names; num_user_rrefs is of our own."""
    with session.lock:
        entries = list(session.lifetime.owned.entries.values())
        forks = list(session.lifetime.used.forks.values())
        return {
            "num_owner_rrefs": str(len(entries)),
            "num_forks": str(sum(len(entry.holders) for entry in entries)),
            "num_pending_users": str(sum(not fork.confirmed for fork in forks)),
            "num_user_rrefs": str(len(forks)),
            "num_pending_futures": str(sum(len(entry.waiting) for entry in entries)),
        }


def _describe_value(session: RRefSession, entry: OwnedValue) -> LiveRRef:
    workers = session.agent.workers
    ranks = sorted({holder.rank for holder in entry.holders.values()})
    what = entry.what
    if not what and entry.settled:
        what = f"{type(entry.value).__module__}.{type(entry.value).__qualname__}"
    return LiveRRef(
        id=entry.id,
        owner=session.agent.me.name,
        creator=workers[entry.id.created_on].name,
        what=what,
        settled=entry.settled,
        forks=len(entry.holders),
        holders=tuple(workers[rank].name for rank in ranks),
    )


class _Checking:
    leaks = False


def install(agent: Agent) -> None:
    """Begin a session, before the agent takes messages."""
    session = sessions.begin_session(agent)
    register_pickling()
    agent.unwanted = discard_answer
    agent.when_lost.append(forget)
    rref.serve_creations(session)
    rref.serve_fetches(session)


def release_all() -> None:
    """Take all RRefs of other workers' values away, held or not, and tell their owners. Not in the loop."""
    session = sessions.current_session()
    session.perform(session.lifetime.drop_all)


def leaked() -> list[str]:
    """What is left after release_all of every worker: values that others still hold."""
    return [str(each) for each in live()]


def uninstall() -> None:
    """End the session: using RRefs of it raises from now on."""
    sessions.end_session()


def forget(rank: int, failure: Exception) -> None:
    """Worker `rank` is gone: what it held is given up, what it was to create fails with `failure`. In the loop."""
    session = sessions.running_session()
    if session is not None:
        session.perform_in_loop(session.lifetime.forget, rank, failure)


def set_leak_checking(on: bool) -> None:
    """Whether shutdown raises where RRefs are left over; off by default."""
    _Checking.leaks = on


def checks_leaks() -> bool:
    """Whether it does."""
    return _Checking.leaks


def live() -> list[LiveRRef]:
    """The values that this worker keeps for others; empty outside of a session."""
    session = sessions.running_session()
    return live_in(session) if session is not None else []


def debug_info() -> dict[str, str]:
    """Counts under torch's names. Raises: RuntimeError outside of a session."""
    return debug_info_of(sessions.current_session())
