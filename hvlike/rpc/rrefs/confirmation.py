"""Functions start only when the owners know of all RRefs among their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvlike.rpc.rrefs.fork import Fork
from hvlike.rpc.rrefs.session import current

if TYPE_CHECKING:
    from hvlike.rpc.rref import RRef


def when_confirmed(rrefs: Sequence[RRef[Any]], then: Callable[[], None]) -> None:
    """Call `then` when all RRefs are confirmed by their owners: now if they are, else in a thread of its own time.

    rrefs: those met in one message. Does not block, holds no thread.
    """
    forks = [rref.held for rref in rrefs if isinstance(rref.held, Fork)]
    if all(fork.confirmed for fork in forks):
        then()
        return
    session = current()
    if session.perform(session.lifetime.used.when_confirmed, forks, then):
        then()
