"""What the MPI library that is loaded says of itself: whether it takes memory of a GPU. A claim, and no proof."""

from __future__ import annotations

import ctypes
from pathlib import Path

MAPS = Path("/proc/self/maps")


def claims_cuda(maps: Path = MAPS) -> bool | None:
    """Ask it; Open MPI and MPICH have a function for that. None where there is none. Local, once MPI is loaded."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/libmpi." in line}
    for path in paths:
        question = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if question is not None:
            return bool(question())
    return None
