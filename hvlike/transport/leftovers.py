"""Files of the MPI library that would outlive a job that is aborted or killed.

MPICH keeps its start-up segment (about 1 MiB a rank) under a name in /dev/shm until MPI_Finalize, and nobody removes
it when the job ends in another way: a machine on which jobs fail fills its shared memory. Once every rank has mapped
the segment the name has no use any more. Open MPI's launcher removes its files itself.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_START_UP_SEGMENTS = "/dev/shm/mpich_shm_"


def unlink_start_up_segments() -> None:
    """Take the names of the start-up segments that this process maps; the memory lives on.

    One rank of a node calls it, after MPI has started on all of them. Elsewhere than under MPICH on Linux it does
    nothing.
    """
    for path in _mapped():
        # Another rank of the node may have been faster, where a machine is split into several nodes for trials.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _mapped() -> set[str]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    # A name that is gone already is shown with "(deleted)" behind it.
    return {line.split()[-1] for line in lines if line.split()[-1].startswith(_START_UP_SEGMENTS)}
