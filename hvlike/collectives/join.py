"""join: a rank that is out of data lets the others go on without it."""

from __future__ import annotations

from hvlike.collectives.context import current
from hvlike.collectives.joining import JoinEnd, Scope
from hvlike.collectives.standing_in import begin_standing_in, set_away, settle
from hvlike.errors import HorovodInternalError, UsageError


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks say so.

    Meanwhile this rank is neutral in what the others do: it contributes the identity of the op to allreduce and
    grouped allreduce (zeros to the gradients of optimizers; Average still divides by all ranks) and counts as arrived
    in barriers. Other collectives raise HorovodInternalError on the active ranks; the job goes on.
    device: accepted for Horovod's sake; nothing depends on it.
    Returns the rank that joined last, the same on all ranks. Collective: every rank of the job calls it. Blocks.
    The numbers of unnamed operations, which differ by then, are aligned when it ends.
    Raises: UsageError between backward and step, and inside a Join context; PeerLeftError, ShutdownError
        (HorovodInternalErrors).
    Source: horovod.torch.join.
    """
    context = current()
    memberships = [context.registry.memberships[number] for number in sorted(context.registry.memberships)]
    for membership in memberships:
        if membership.rounds.inside:
            raise UsageError("hvd.join() inside a Join context, which does the same at its end. Leave it first.")
        for each in list(membership.shadows.planned):
            if each.busy:
                raise UsageError(
                    f"hvd.join() between backward and step: {each.name!r} is being reduced. Call optimizer.step() or "
                    "optimizer.synchronize() first."
                )
    marks = [membership.shadows.marks() for membership in memberships]
    for membership in memberships:
        set_away(membership, True)
    try:
        handles = [
            begin_standing_in(membership, mine, Scope.EVERYTHING, "called hvd.join()")
            for membership, mine in zip(memberships, marks, strict=True)
        ]
        ends: list[JoinEnd] = [handle.result() for handle in handles]
        settle(memberships, ends)
    except HorovodInternalError:
        for membership in memberships:
            context.fabric.loop.post(membership.shadows.give_up, wake=False)
        raise
    finally:
        for membership in memberships:
            set_away(membership, False)
    return ends[0].last
