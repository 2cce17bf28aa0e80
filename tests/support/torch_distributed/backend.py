"""Which backend of torch.distributed the tests run, and how they start it.

They are a specification of torch.distributed: HVLIKE_TEST_TORCH_BACKEND=gloo runs the same tests with gloo, which shows
that a test asks for nothing that torch does not promise. What gloo refuses is marked beyond_gloo.
"""

import itertools
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

BACKEND = os.environ.get("HVLIKE_TEST_TORCH_BACKEND", "hvlike")
beyond_gloo = pytest.mark.skipif(BACKEND == "gloo", reason="gloo refuses what torch.distributed defines")

TEMP = False  # Until the rendezvous has landed
_starts = itertools.count()


class World(NamedTuple):
    """The place of this rank, how many there are, and the place of the next one."""

    rank: int
    size: int
    next: int


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
    elif not hasattr(dist.Backend, "HVLIKE") or TEMP:
        globals()["TEMP"] = True
        import hvlike

        hvlike.init()
        from hvlike.torch_distributed.process_group import create

        if not hasattr(dist.Backend, "HVLIKE"):
            dist.Backend.register_backend("hvlike", create, extended_api=True, devices=["cpu", "cuda"])
        path = Path(tempfile.gettempdir()) / f"hvlike-gloo-{os.getppid()}-{next(_starts)}"
        store = dist.FileStore(str(path), hvlike.size())
        dist.init_process_group("hvlike", store=store, rank=hvlike.rank(), world_size=hvlike.size(), timeout=timeout)
    else:
        dist.init_process_group(BACKEND, timeout=timeout)
