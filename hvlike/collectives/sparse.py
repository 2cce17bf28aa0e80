"""The sum of sparse tensors over ranks: their indices and values gathered, duplicates left for coalesce()."""

from __future__ import annotations

import torch

from hvlike.collectives.allgather import allgather_async
from hvlike.collectives.bucket import Settings
from hvlike.collectives.process_set import ProcessSet
from hvlike.errors import UsageError
from hvlike.planes.ops import ReduceOp, op_name


class SparseSum:
    """One sparse reduction in flight."""

    def __init__(self, tensor: torch.Tensor, name: str, settings: Settings, process_set: ProcessSet | None) -> None:
        """Start gathering; a dense tensor (a stand-in of zeros) contributes nothing. Collective."""
        if settings.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UsageError(f"op {op_name(settings.op)} is not defined on sparse gradients; possible: Average, Sum.")
        own = tensor.detach() if tensor.is_sparse else empty_like_sparse(tensor)
        own = own.coalesce()
        self._shape = tuple(own.shape)
        divisor = settings.size if settings.op is ReduceOp.AVERAGE else 1
        self._factor = settings.prescale * settings.postscale / divisor
        # One row for each entry of the sparse tensor: what differs between ranks is the first dimension.
        self._indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)
        self._values = allgather_async(own.values().contiguous(), f"{name}.values", process_set)

    def result(self) -> torch.Tensor:
        """Wait for the sum."""
        indices, values = self._indices.result(), self._values.result()
        return torch.sparse_coo_tensor(
            indices.t(), values * self._factor, self._shape, check_invariants=False
        ).coalesce()


def empty_like_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of one sparse dimension without entries, shaped like a dense one."""
    indices = torch.empty((1, 0), dtype=torch.int64)
    values = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    return torch.sparse_coo_tensor(indices, values, tuple(tensor.shape), check_invariants=False)
