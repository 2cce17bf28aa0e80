"""Files of the MPI library that would outlive a job that is aborted or killed.

MPICH keeps its start-up segment (about 1 MiB a rank) under a name in /dev/shm until MPI_Finalize, and nobody removes
it when the job ends in another way: a machine on which jobs fail fills its shared memory. Once every rank has mapped
the segment the name has no use any more. Open MPI's launcher removes its files itself; a process without a launcher
leaves its segment behind, even when it ends well, and so do all ranks whose launcher was killed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MPICH_SEGMENTS = "/dev/shm/mpich_shm_"
_OPEN_MPI_SEGMENTS = "/dev/shm/sm_segment."


def unlink_start_up_segments(*, alone: bool) -> None:
    """Take the names of the start-up segments that this process maps; the memory lives on.

    alone: no other process will use them, as this is the whole job, or all of it ends; Open MPI's ranks map each
    other's segments later, by name.
    One rank of a node calls it, after MPI has started on all of them. It does nothing where nothing is left.
    """
    for path in _mapped((_MPICH_SEGMENTS, _OPEN_MPI_SEGMENTS) if alone else (_MPICH_SEGMENTS,)):
        # Another rank of the node may have been faster, where a machine is split into several nodes for trials.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _mapped(prefixes: tuple[str, ...]) -> set[str]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    # A name that is gone already is shown with "(deleted)" behind it.
    return {line.split()[-1] for line in lines if line.split()[-1].startswith(prefixes)}
