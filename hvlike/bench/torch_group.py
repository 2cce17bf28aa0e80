"""torch.distributed as a contestant: a process group of its own beside hvlike, on one node, over gloo or NCCL."""

from __future__ import annotations

import datetime
from typing import Any

import torch

import hvlike

GLOO, NCCL = "gloo", "nccl"

_LOOPBACK = "127.0.0.1"


def backend_for(device: torch.device) -> str:
    """NCCL where each rank of this node can have a GPU of its own; gloo for the CPU, and where ranks share a GPU."""
    if device.type == "cpu" or hvlike.local_size() > torch.cuda.device_count():
        return GLOO
    return NCCL if torch.distributed.is_nccl_available() else GLOO


def unavailable(backend: str = GLOO) -> str | None:
    """Why it cannot take part, or None."""
    distributed: Any = torch.distributed
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its rendezvous here is on loopback"
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        return "this torch was built without it"
    return None


class TorchGroup:
    """A process group of torch over all ranks. Collective."""

    def __init__(self, backend: str = GLOO) -> None:
        distributed: Any = torch.distributed
        rank, size = hvlike.rank(), hvlike.size()
        patience = datetime.timedelta(seconds=60)
        store = distributed.TCPStore(_LOOPBACK, 0, size, True, patience, wait_for_workers=False) if rank == 0 else None
        port = torch.tensor([store.port if store else 0])
        hvlike.broadcast_(port, 0, name=f"{backend}'s port")
        if store is None:
            store = distributed.TCPStore(_LOOPBACK, int(port), size, False, patience)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        self.backend = backend
        self._distributed = distributed

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks in place."""
        self._distributed.all_reduce(tensor)

    def close(self) -> None:
        """End the process group."""
        self._distributed.destroy_process_group()
