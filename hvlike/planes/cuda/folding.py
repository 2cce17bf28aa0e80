"""Reducing several copies on a device by torch, where no library does it: in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.planes.cuda.nccl_reduction import Recipe

_HALVES = (torch.float16, torch.bfloat16)

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "min": lambda total, each: torch.minimum(total, each, out=total),
    "max": lambda total, each: torch.maximum(total, each, out=total),
    "prod": torch.Tensor.mul_,
}


def fold(ordered: Sequence[torch.Tensor], result: torch.Tensor, recipe: Recipe) -> None:
    """Write the reduction of flat tensors, one of each rank, to `result`, which may be one of them.

    16-bit floats are reduced in float32 and rounded once. The factors of the recipe are left to the caller.
    """
    if not len(result):
        return
    wide = torch.float32 if result.dtype in _HALVES else result.dtype
    total = ordered[0].to(wide, copy=True)
    for each in ordered[1:]:
        _FOLDS[recipe.op](total, each.to(wide))
    if recipe.op == "avg":
        total.mul_(1 / len(ordered))
    result.copy_(total)
