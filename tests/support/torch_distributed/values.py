"""Tensors that say whose they are, and what a reduction of them is: computed with torch alone, in one process."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = dist.ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
# What gloo refuses.
UNKNOWN_TO_GLOO = (torch.int16, torch.bool)
ARITHMETIC = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.mean(0),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
}


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


def reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors reduced by an operation: 16-bit floats in float32, rounded once."""
    rows = torch.stack(list(tensors))
    dtype = rows.dtype
    if op in ("BAND", "BOR", "BXOR"):
        result = rows[0].clone()
        for row in rows[1:]:
            result = result & row if op == "BAND" else result | row if op == "BOR" else result ^ row
        return result
    if dtype == torch.bool:
        return rows.any(0) if op in ("SUM", "MAX") else rows.all(0)
    wide = rows.float() if dtype in (torch.float16, torch.bfloat16) else rows
    return ARITHMETIC[op](wide).to(dtype)
