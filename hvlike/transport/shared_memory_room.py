"""A full /dev/shm, said before MPI starts: what MPI libraries say of it afterwards names anything but that."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("hvlike")

FOLDER = "/dev/shm"
LITTLE_BYTES = 4 << 20
"""With less than this, Open MPI and MPICH have failed to start."""

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID")


def warn_if_full(folder: str = FOLDER) -> None:
    """Log a warning, on the first rank of a node, when there is hardly any room for MPI's shared memory. Local."""
    number = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    if number != "0" or not os.path.isdir(folder):
        return
    room = os.statvfs(folder)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    # Size 0: a file system without a limit of its own.
    if size and free < LITTLE_BYTES:
        logger.warning(
            "%s has %d KiB free of %d KiB: MPI keeps its shared memory there and may fail to start. Remove what other "
            "jobs have left in it, or give the container more (docker run --shm-size=1g).",
            folder,
            free >> 10,
            size >> 10,
        )
