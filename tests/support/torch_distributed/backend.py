"""Which backend of torch.distributed the tests run, and how they start it.

They are a specification of torch.distributed: HVLIKE_TEST_TORCH_BACKEND=gloo runs the same tests with gloo, which shows
that a test asks for nothing that torch does not promise. What gloo refuses is marked beyond_gloo.
"""

import itertools
import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

BACKEND = os.environ.get("HVLIKE_TEST_TORCH_BACKEND", "hvlike")
beyond_gloo = pytest.mark.skipif(BACKEND == "gloo", reason="gloo refuses what torch.distributed defines")

_starts = itertools.count()


class World(NamedTuple):
    """The place of this rank, how many there are, and the place of the next one."""

    rank: int
    size: int
    next: int


def on_several_hosts(world: World) -> bool:
    """Whether the ranks are on several hosts. Collective."""
    names = [""] * world.size
    dist.all_gather_object(names, socket.gethostname())
    return len(set(names)) > 1


def start(timeout: timedelta | None = None) -> None:
    """Start torch.distributed on all ranks."""
    if BACKEND == "gloo":
        # The launcher is the parent of all ranks.
        path = Path(tempfile.gettempdir()) / f"hvlike-gloo-{os.getppid()}-{next(_starts)}"
        size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        store = dist.FileStore(str(path), size)
        dist.init_process_group(
            "gloo", store=store, rank=int(os.environ["OMPI_COMM_WORLD_RANK"]), world_size=size, timeout=timeout
        )
    else:
        # Registers it where hvlike is on the path and not installed.
        import hvlike  # noqa: F401

        dist.init_process_group(BACKEND, timeout=timeout)
