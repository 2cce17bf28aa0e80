"""to_here: copy a value from its owner.

The request names the RRef and the fork it is made through; the owner counts it. Where the value is still to come, the
request waits in the entry and holds no thread.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from hvlike.rpc import calls, contexts
from hvlike.rpc.devices.devices import follow
from hvlike.rpc.message import FETCH, Packed, Request
from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.identity import GlobalId
from hvlike.rpc.rrefs.session import Session

_NAMES = struct.Struct("<iqiq")


def fetch(session: Session, fork: Fork, timeout: float) -> Any:
    """A copy of the value on the owner of `fork`, which the caller holds. Blocks."""
    agent = session.agent
    limit = calls.seconds(agent, timeout)
    session.perform(session.lifetime.used.fetch, fork)
    names = Packed(_NAMES.pack(*fork.rref, *fork.id), [], contexts.note_to(fork.owner, "to_here"))
    call = agent.request(fork.owner, FETCH, names, timeout=limit, now=False)
    agent.wait(call)
    return calls.result_of(agent, call, original=True)


def serve(session: Session) -> None:
    """Have this worker send its values to those who hold RRefs of them."""
    # No function of a caller runs here: workers whose threads all wait for values of each other still get them.
    session.agent.serve(FETCH, partial(_look_up, session), limited=False)


def _look_up(session: Session, request: Request) -> None:
    numbers = _NAMES.unpack(request.packed.body)
    rref, fork = GlobalId(*numbers[:2]), GlobalId(*numbers[2:])
    request.about = f"to_here of {rref}"
    if request.packed.note is not None:
        contexts.installed().came(request.packed.note, request.source, ())
    entry = session.perform(session.lifetime.owned.fetched, rref, fork, request.source)
    session.when_settled(entry, partial(_answer, session, request, entry))


def _answer(session: Session, request: Request, entry: Entry) -> None:
    if entry.failure is not None:
        request.fail(entry.failure)
        return
    try:
        follow(entry.marks)
        packed = calls.packed_answer(session.agent, request, entry.value)
    except Exception as error:
        request.fail(RuntimeError(f"The value of this RRef cannot be sent: {type(error).__name__}: {error}"))
    else:
        request.answer(packed)
