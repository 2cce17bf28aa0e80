"""One checkpoint that holds what every rank remembers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvlike.collectives.lifecycle import rank, size
from hvlike.collectives.objects import broadcast_object
from hvlike.errors import UsageError
from hvlike.training.optimizer import DistributedOptimizer


def gather_optimizer_state(optimizer: DistributedOptimizer, root_rank: int = 0) -> dict[str, Any] | None:
    """Return, on the root, the optimizer's state dict with the compression errors of all ranks in it.

    Saved by the root and loaded by every rank, it continues a compressed run exactly, in a job of the same size.
    Without a compressor that remembers errors it is `optimizer.state_dict()`. root_rank: global rank of the root.
    Collective: every rank of the optimizer's process set calls it, between steps. Blocks until done; the errors of
    one rank at a time are in memory beside those that the root keeps.
    Returns None on the other ranks. Raises: UsageError for anything but a DistributedOptimizer.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise UsageError(f"gather_optimizer_state expects a DistributedOptimizer, got {type(optimizer).__name__}.")
    process_set = optimizer.process_set
    state = optimizer.state_dict()
    memory = state.get("compression")
    errors: dict[int, dict[str, Tensor]] = {}
    for each in process_set.ranks or range(size()):
        # The root shall not have them on its GPU as well.
        kept = memory["errors"] if memory is not None and each == rank() else {}
        own = {number: {name: error.cpu() for name, error in found.items()} for number, found in kept.items()}
        received = broadcast_object(own, each, process_set=process_set)
        if rank() == root_rank:
            errors.update(received)
    if rank() != root_rank:
        return None
    return state if memory is None else state | {"compression": memory | {"errors": errors}}
