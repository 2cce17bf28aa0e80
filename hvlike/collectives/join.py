"""join: a rank that is out of data lets the others go on without it."""

from __future__ import annotations

from collections.abc import Mapping

from hvlike.collectives.compression import Mark
from hvlike.collectives.context import current
from hvlike.collectives.handles import Handle
from hvlike.collectives.joining import JOIN_KEY, JoinEnd, JoinRequest
from hvlike.collectives.membership import Membership
from hvlike.collectives.request import Signature
from hvlike.collectives.shadows import raise_first
from hvlike.collectives.submission import submit
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks say so.

    Meanwhile this rank is neutral in what the others do: it contributes the identity of the op to allreduce and
    grouped allreduce (zeros to the gradients of optimizers; Average still divides by all ranks) and counts as arrived
    in barriers. Other collectives raise HorovodInternalError on the active ranks; the job goes on.
    device: accepted for Horovod's sake; nothing depends on it.
    Returns the rank that joined last, the same on all ranks. Collective: every rank of the job calls it. Blocks.
    The numbers of unnamed operations, which differ by then, are aligned when it ends.
    Raises: UsageError between backward and step; PeerLeftError, ShutdownError (HorovodInternalErrors).
    Source: horovod.torch.join.
    """
    context = current()
    memberships = [context.registry.memberships[number] for number in sorted(context.registry.memberships)]
    for membership in memberships:
        for each in list(membership.shadows.planned):
            if each.busy:
                raise UsageError(
                    f"hvd.join() between backward and step: {each.name!r} is being reduced. Call "
                    "optimizer.step() or optimizer.synchronize() first."
                )
    marks = [membership.shadows.marks() for membership in memberships]
    for membership in memberships:
        _set_away(membership, True)
    try:
        handles = [_start(*each) for each in zip(memberships, marks, strict=True)]
        ends: list[JoinEnd] = [handle.result() for handle in handles]
        _settle(memberships, ends)
    except HorovodInternalError:
        for membership in memberships:
            context.fabric.loop.post(membership.shadows.give_up, wake=False)
        raise
    finally:
        for membership in memberships:
            _set_away(membership, False)
    return ends[0].last


def _set_away(membership: Membership, away: bool) -> None:
    if membership.express is not None:
        membership.express.set_away(away)


def _start(membership: Membership, marks: Mapping[str, Mark]) -> Handle:
    shadows = membership.shadows
    request = JoinRequest(
        membership.negotiator.names.counts(),
        shadows.plans(),
        frozenset(membership.lanes.spare_numbers()),
        marks,
    )
    ends: list[JoinEnd] = []

    def job(end: JoinEnd) -> Job:
        def run(plane: Plane) -> Routine[None]:
            # On the lane like any other operation: what was agreed before has ended then.
            ends.append(end)
            yield from ()

        return run

    # First the shadows: what the others begin once they know of this rank needs them.
    current().fabric.loop.post(shadows.begin, wake=False)
    signature = Signature("join", detail=request)
    return submit(membership, signature, JOIN_KEY[1], [], lambda request: ends[0], wake=False, job=job)


def _settle(memberships: list[Membership], ends: list[JoinEnd]) -> None:
    """Wait for the last step of every plan, the one without an active rank, and go on alike."""
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
