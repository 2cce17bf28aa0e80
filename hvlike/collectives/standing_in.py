"""A rank that has no more data stands in for the others until all have none: what hvd.join() and Join share."""

from __future__ import annotations

from collections.abc import Mapping

from hvlike.collectives.compression import Mark
from hvlike.collectives.context import current
from hvlike.collectives.handles import Handle
from hvlike.collectives.joining import JOIN_KEY, JoinEnd, JoinRequest, Scope
from hvlike.collectives.membership import Membership
from hvlike.collectives.request import Signature
from hvlike.collectives.shadows import raise_first
from hvlike.collectives.submission import submit
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def set_away(membership: Membership, away: bool) -> None:
    """Keep off the express way, and let the others keep off it. Local."""
    if membership.express is not None:
        membership.express.set_away(away)


def begin_standing_in(membership: Membership, marks: Mapping[str, Mark], scope: Scope, how: str) -> Handle:
    """Say that this rank has no more data; the handle's result, a JoinEnd, is there when all have said so."""
    shadows = membership.shadows
    # Nothing of it may vanish before it has its shadow: the others count on it.
    planned = list(shadows.planned)
    request = JoinRequest(
        membership.negotiator.names.counts(),
        shadows.plans(planned),
        shadows.spare_lanes(),
        marks,
        scope,
        how,
    )
    ends: list[JoinEnd] = []

    def job(end: JoinEnd) -> Job:
        def run(plane: Plane) -> Routine[None]:
            # On the lane like any other operation: what was agreed before has ended then.
            ends.append(end)
            yield from ()

        return run

    # First the shadows: what the others begin once they know of this rank needs them.
    current().fabric.loop.post(lambda: shadows.begin(planned), wake=False)
    signature = Signature("join", detail=request)
    return submit(membership, signature, JOIN_KEY[1], [], lambda request: ends[0], wake=False, job=job)


def settle(memberships: list[Membership], ends: list[JoinEnd]) -> None:
    """Wait for the last step of every plan, the one without an active rank, and go on alike.

    Raises: what has gone wrong in a shadow.
    """
    loop = current().fabric.loop
    pairs = list(zip(memberships, ends, strict=True))
    loop.wait(lambda: all(each.shadows.settled(end.plans) for each, end in pairs))
    errors: list[BaseException | None] = []

    def end_all() -> None:
        for membership, end in pairs:
            errors.append(membership.shadows.error())
            membership.shadows.end(end.plans, end.spare_lanes)

    loop.post(end_all, wake=False)
    loop.wait(lambda: len(errors) == len(pairs))
    raise_first(errors)
