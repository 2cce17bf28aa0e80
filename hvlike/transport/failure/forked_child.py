"""How a process ends that was forked from a rank whose MPI the program has started itself, by importing mpi4py.MPI.

mpi4py finalises MPI at the very end of the interpreter, in a child, too, where MPI_Finalize waits for ever. So such a
child runs its exit handlers and then leaves with its status, without what comes after them. Where hvlike has started
MPI nothing of this is needed (transport/host/mpi_library.py).

The status of `raise SystemExit(n)` cannot be known there (exit_status.py): it is 0.
"""

from __future__ import annotations

import atexit
import os
import sys

from hvlike.observe import printing
from hvlike.transport.failure.exit_status import ExitObserver, status_of_this_process
from hvlike.transport.host.mpi_library import ForkMark


class _Child:
    are_watched = False
    last_error: object = None


def watch_forks() -> None:
    """Have children that this process forks from now on end like this. A second call does nothing."""
    if not _Child.are_watched:
        _Child.are_watched = True
        os.register_at_fork(after_in_child=_begin)


def _begin() -> None:
    """In a child, after the fork; it is marked already."""
    if ForkMark.forked and not ForkMark.may_finalise:
        ExitObserver().install()
        _Child.last_error = getattr(sys, "last_value", None)
        # The last one that is registered runs first.
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    atexit.unregister(_leave)
    status = status_of_this_process()
    if status is None:
        status = int(getattr(sys, "last_value", None) is not _Child.last_error)
    try:
        # Those that the parent had registered, too: as in any forked child.
        atexit._run_exitfuncs()
        printing.flush()
    finally:
        os._exit(status)
