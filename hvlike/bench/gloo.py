"""torch.distributed over gloo as a contestant: its own process group beside hvlike, on one node."""

from __future__ import annotations

import datetime
from typing import Any

import torch

import hvlike

_LOOPBACK = "127.0.0.1"


def unavailable() -> str | None:
    """Why gloo cannot take part, or None."""
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its rendezvous here is on loopback"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this torch was built without it"
    return None


class Gloo:
    """A gloo process group over all ranks. Collective."""

    def __init__(self) -> None:
        distributed: Any = torch.distributed
        rank, size = hvlike.rank(), hvlike.size()
        patience = datetime.timedelta(seconds=60)
        store = distributed.TCPStore(_LOOPBACK, 0, size, True, patience, wait_for_workers=False) if rank == 0 else None
        port = torch.tensor([store.port if store else 0])
        hvlike.broadcast_(port, 0, name="gloo's port")
        if store is None:
            store = distributed.TCPStore(_LOOPBACK, int(port), size, False, patience)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        self._distributed = distributed

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks in place."""
        self._distributed.all_reduce(tensor)

    def close(self) -> None:
        """End the process group."""
        self._distributed.destroy_process_group()
