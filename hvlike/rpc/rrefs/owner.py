"""The owner's side of RRefs: makes values for remote() and sends copies of them for to_here().

A request to create a value carries the names of the RRef and of the creator's fork before the call. It is answered when
the function has ended: an exception stays with the value and is raised where that is used. A request to copy a value
names the RRef and the fork it is made through, and the owner counts it. While the value is computed, the request waits
in the owner's table and holds no thread.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.calls import pack_answer, run_when_confirmed
from hvlike.rpc.rrefs.records import GlobalId, OwnedValue
from hvlike.rpc.rrefs.session import RRefSession, set_session
from hvlike.rpc.wire.autograd_hooks import autograd_hooks
from hvlike.rpc.wire.devices import follow
from hvlike.rpc.wire.message import FETCH, REMOTE, Packed, Request, describe_error
from hvlike.rpc.wire.pickler import Incoming, unpack
from hvlike.rpc.wire.reducers import function_name

NAMES = struct.Struct("<iqiq")
"""The names of an RRef and of a fork in a request."""

NO_FORK = GlobalId(-1, -1)
"""In a request of the owner to itself."""

_DONE = Packed(b"", [])


def begin_rrefs(agent: Agent) -> None:
    """Begin the session of RRefs; the agent does not receive messages yet."""
    session = RRefSession(agent)
    agent.serve(REMOTE, partial(_create, session))
    # Not limited, because no function of a caller runs: workers whose threads all wait for values still get them.
    agent.serve(FETCH, partial(_look_up, session), limited=False)
    set_session(session)


def _create(session: RRefSession, request: Request) -> None:
    """Serve remote(). In a pool thread."""
    body = request.packed.body
    numbers = NAMES.unpack_from(body)
    rref, fork = GlobalId(*numbers[:2]), GlobalId(*numbers[2:])
    entry = session.perform(session.lifetime.create, rref, None if fork == NO_FORK else fork, request.source)
    fail = partial(_settle_failure, session, entry, request)
    incoming = Incoming(request.source)
    try:
        function = unpack(request.packed._replace(body=body[NAMES.size :]), incoming)
    except Exception as error:
        fail(error)
        return
    entry.what = request.about = function_name(function[0])
    answer = partial(_settle, session, entry, request)
    run_when_confirmed(session.agent, request, incoming.rrefs, function, answer, fail)


def _settle(session: RRefSession, entry: OwnedValue, request: Request, value: Any) -> None:
    session.settle(entry, value)
    request.answer(_DONE)


def _settle_failure(session: RRefSession, entry: OwnedValue, request: Request, error: BaseException) -> None:
    session.settle(entry, failure=describe_error(error, session.agent.me))
    request.answer(_DONE)


def _look_up(session: RRefSession, request: Request) -> None:
    """Serve to_here(). In a pool thread."""
    numbers = NAMES.unpack(request.packed.body)
    rref, fork = GlobalId(*numbers[:2]), GlobalId(*numbers[2:])
    request.about = f"to_here of {rref}"
    if request.packed.note is not None:
        autograd_hooks().came(request.packed.note, request.source, ())
    entry = session.perform(partial(session.lifetime.owned.note, fetched=True), rref, fork, request.source)
    session.when_settled(entry, partial(_send_copy, session, request, entry))


def _send_copy(session: RRefSession, request: Request, entry: OwnedValue) -> None:
    if entry.failure is not None:
        request.answer(entry.failure)
        return
    try:
        follow(entry.events)
        packed = pack_answer(session.agent, request, entry.value)
    except Exception as error:
        request.answer(RuntimeError(f"The value of this RRef cannot be sent: {type(error).__name__}: {error}"))
    else:
        request.answer(packed)
