"""Tensors that say whose they are."""

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = dist.ReduceOp


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
