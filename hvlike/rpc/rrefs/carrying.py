"""How RRefs travel inside messages, which is the only way they can be pickled."""

from __future__ import annotations

from functools import partial
from typing import Any

from hvlike.errors import RpcError
from hvlike.rpc import contexts
from hvlike.rpc import rref as rref_module
from hvlike.rpc.message import CALL, FETCH, Packed
from hvlike.rpc.pickler import Incoming, Outgoing, carry_ahead, discard
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.identity import Ticket
from hvlike.rpc.rrefs.session import current


def reduce(rref: rref_module.RRef[Any], outgoing: Outgoing) -> tuple[int, ...]:
    """The numbers by which `rref` travels. Raises: RuntimeError for one that cannot be sent any more."""
    session, held = rref.session, rref.held
    if session.is_over or (isinstance(held, Fork) and held.dropped):
        raise RpcError(f"{rref.name} has been deleted. Cannot call fork an UserRRef after deletion.")
    if rref.creation is not None:
        rref.creation.check()
    ticket = session.perform(session.lifetime.send, held, outgoing.destination)
    outgoing.undo.append(partial(session.perform, session.lifetime.unsend, held, ticket))
    return ticket.pack()


def restore(numbers: tuple[int, ...], incoming: Incoming) -> rref_module.RRef[Any]:
    """The RRef that has travelled as these numbers: the owner's own on its owner, a new fork elsewhere."""
    session = current()
    held = session.perform(session.lifetime.receive, Ticket.unpack(numbers), incoming.source)
    rref: rref_module.RRef[Any] = rref_module.RRef.of(session, held)
    incoming.rrefs.append(rref)
    return rref


def discard_answer(kind: int, source: int, packed: Packed) -> None:
    """The answer to a call that has ended without it: its RRefs are dropped, no gradients will come for its tensors."""
    if packed.note is not None:
        contexts.installed().unwanted(packed.note, source)
    if kind in (CALL, FETCH):
        discard(packed, Incoming(source))


def register() -> None:
    """Let the pickler know."""
    carry_ahead(rref_module.RRef, reduce, restore)
