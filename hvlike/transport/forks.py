"""Children of a rank: MPI works only in the process that started it.

A DataLoader worker or any other forked child inherits hvlike's objects, but a call into MPI from there corrupts the
parent's job. The fork marks the child, and `check` refuses.
"""

from __future__ import annotations

import os
import sys

from hvlike.errors import ForkedProcessError


class _Mark:
    """True in a child that was forked while MPI was running in its parent."""

    forked = False


def _mark_child() -> None:
    # A process forked before MPI started is free to start it.
    _Mark.forked = _Mark.forked or "mpi4py.MPI" in sys.modules


os.register_at_fork(after_in_child=_mark_child)


def is_forked() -> bool:
    """Whether this process was forked from a rank."""
    return _Mark.forked


def check() -> None:
    """Raise ForkedProcessError in a process that was forked from a rank. Costs one attribute read."""
    if _Mark.forked:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from a rank (process {os.getppid()}), a DataLoader worker for instance, "
            "and MPI works only in the rank itself. Make this call there and hand its result to the child."
        )
