"""shutdown() and init() again, with the same ranks and the same process sets."""

from __future__ import annotations

from hvlike.collectives import context
from hvlike.collectives.lifecycle import init, shutdown
from hvlike.collectives.process_set import registered_sets
from hvlike.errors import NotInitializedError


def restart() -> None:
    """Start hvlike anew, whatever was in flight; it must be running, or have been stopped by an error on the way.

    Process sets are registered again: the same objects, under new numbers. Collective: all ranks; blocks until all do.
    Raises: NotInitializedError when hvlike does not run; UsageError on every rank where the ranks' sets differ.
    """
    if not context.is_running():
        raise NotInitializedError("Horovod has not been initialized; use hvd.init(). Call it before elastic.run.")
    world, sets = context.current().world, registered_sets()
    # The ranks may be some of the job's only: init(comm=...) was called with a list or a communicator.
    members, everybody = world.comm.Get_group(), world.mpi.COMM_WORLD.Get_group()
    try:
        ranks = list(world.mpi.Group.Translate_ranks(members, list(range(world.size)), everybody))
    finally:
        members.Free()
        everybody.Free()
    shutdown()
    init(ranks, process_sets=sets)
