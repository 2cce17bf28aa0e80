"""Shared memory that all ranks of one node map: one rank makes an offer, and the others accept it.

`share` does that with blocking MPI calls, Fabric.share with messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hvlike.errors import LaunchError
from hvlike.system.mapped_memory import Segment, SegmentLocation
from hvlike.system.system import system

T = TypeVar("T")

_ATTEMPTS = 2


Exchange = Generator[Any, None, T]  # Steps of an exchange: a coroutine, or it never yields and calls block


def share_steps(
    nbytes: int, *, leads: bool, tell: Callable[[Any], Exchange[Any]], collect: Callable[[bool], Exchange[bool]]
) -> Exchange[Segment | None]:
    """One zeroed segment for all ranks that run this; None where they cannot share so much. One rank `leads`: `tell`
    gives its value to all, `collect` tells it whether all say yes.
    """
    for attempt in range(_ATTEMPTS):
        made = system.make_offer(nbytes, attempt) if leads else None
        offer: SegmentLocation | None = yield from tell(made.offer if made else None)
        segment = made.segment if made else system.accept(offer) if offer else None
        agreed = yield from collect(segment is not None)
        if made:
            # No rank may write before the cookie is gone: they wait for the answer that follows.
            made.withdraw()
        agreed = yield from tell(agreed)
        if agreed:
            return segment
    return None


def share(comm: Any, nbytes: int) -> Segment:
    """`share_steps` for the ranks of `comm`, blocking, for init(). Raises: LaunchError on every rank if it is None."""

    def now(value: T) -> Exchange[T]:
        yield from ()
        return value

    steps = share_steps(
        nbytes,
        leads=comm.rank == 0,
        tell=lambda value: now(comm.bcast(value, root=0)),
        collect=lambda ok: now(all(comm.allgather(ok))),
    )
    try:
        next(steps)
    except StopIteration as stop:
        if stop.value is not None:
            segment: Segment = stop.value
            return segment
    raise LaunchError(
        f"the ranks of this node cannot share {nbytes} bytes of memory: neither a memfd opened through /proc "
        f"nor a file in /dev/shm works. Give the container more shared memory (docker run --shm-size=256m) "
        "or let the ranks see each other's processes (one PID namespace)."
    )
