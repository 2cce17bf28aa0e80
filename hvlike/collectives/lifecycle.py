"""init, shutdown, and who and where this rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvlike.collectives import context
from hvlike.collectives.process_set import ProcessSet
from hvlike.errors import UsageError


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start hvlike in this process; does nothing while it is running.

    comm: None for all ranks of the job; a list of world ranks that form a job of their own (each rank passes the
        list it is in); or an mpi4py communicator, which is duplicated.
    process_sets: sets to register at once, the same on every rank; "dynamic" is accepted for Horovod's sake.
    Collective: every rank of `comm` calls it. Blocks until all have.
    Without mpirun this is a job of one rank.
    Raises: LaunchError when launcher and MPI disagree; UsageError (a ValueError) for wrong arguments.
    Source: horovod.torch.init.
    """
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise UsageError(f'init: process_sets expects a list of ProcessSet or "dynamic", got {process_sets!r}.')
    elif process_sets is not None:
        sets = list(process_sets)
        for each in sets:
            if not isinstance(each, ProcessSet):
                raise UsageError(f"init: process_sets expects ProcessSet objects, got {type(each).__name__}.")
    context.start(comm, sets)


def shutdown() -> None:
    """End hvlike in this process; `init()` may follow. Does nothing when it is not running.

    Collective in effect: what other ranks have in flight fails with ShutdownError. Blocks until all ranks have
    called it or ended. MPI itself stays up: it can be started only once in a process.
    Source: horovod.torch.shutdown.
    """
    context.stop()


def is_initialized() -> bool:
    """True between init() and shutdown()."""
    return context.is_running()


def size() -> int:
    """Return the number of ranks in the job. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.size


def rank() -> int:
    """Return the number of this rank in the job. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.rank


def local_size() -> int:
    """Return the number of ranks on this node. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.local_size


def local_rank() -> int:
    """Return the number of this rank among those of its node. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.local_rank


def cross_size() -> int:
    """Return the number of nodes that have this local rank. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.cross_size


def cross_rank() -> int:
    """Return the number of this rank among those with its local rank. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.cross_rank


def is_homogeneous() -> bool:
    """True when every node has the same number of ranks. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.homogeneous


def mpi_threads_supported() -> bool:
    """True when MPI was started with THREAD_MULTIPLE. Raises: NotInitializedError (a ValueError)."""
    world = context.current().world
    return bool(world.thread_level >= world.mpi.THREAD_MULTIPLE)
