"""Which backend of torch.distributed the tests run, how they start it, and tensors that say whose they are.

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
import torch
import torch.distributed as dist
from torch import Tensor

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


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that says whose it is; sums and products of a few are exact in every dtype."""
    shape = shape or (2, 3)
    count = torch.Size(shape).numel()
    values = (torch.arange(count) + rank) % 4 + 1
    if dtype == torch.bool:
        values = (torch.arange(count) + rank) % 3 == 0
    if dtype.is_complex:
        values = torch.complex(values.double(), 1.0 - values.double())
    return values.to(dtype).view(shape)


def of_all(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What mine() is on each rank."""
    return [mine(rank, *shape, dtype=dtype) for rank in range(size)]
