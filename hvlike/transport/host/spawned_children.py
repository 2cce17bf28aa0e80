"""Processes that multiprocessing starts anew below a rank (methods spawn and forkserver), DataLoader workers above all.

They inherit the variables by which the launcher has told the rank who it is. One that imports mpi4py.MPI, as the
program's main module may, would start MPI with them, as that rank once more: that crashes the rank and hangs the job.
So mpi4py is told to leave MPI alone in them. Other processes that a rank starts are not touched: they may be jobs.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import util
from typing import Any

_VARIABLE = "MPI4PY_RC_INITIALIZE"
_lock = threading.Lock()


def keep_mpi_from_spawned() -> None:
    """From now on what multiprocessing starts does not start MPI by an import. A second call does nothing."""
    module: Any = util
    start = module.spawnv_passfds
    if getattr(start, "is_of_hvlike", False):
        return

    def start_without_mpi(*arguments: Any) -> int:
        # A new process has the variables of this one.
        with _lock:
            chosen = os.environ.get(_VARIABLE)
            os.environ.setdefault(_VARIABLE, "0")
            try:
                process: int = start(*arguments)
                return process
            finally:
                if chosen is None:
                    del os.environ[_VARIABLE]

    start_without_mpi.is_of_hvlike = True  # type: ignore[attr-defined]
    module.spawnv_passfds = start_without_mpi
