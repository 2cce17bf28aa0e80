"""The factors of a reduction on a device: a kernel for each that is not 1, at most one where they can be joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scale_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply flat tensors of one dtype in place; 16-bit floats in float32, integers in double, toward zero."""
    if factor == 1 or not tensors:
        return
    if tensors[0].dtype.is_floating_point or tensors[0].dtype.is_complex:
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.copy_(tensor.double().mul_(factor).trunc_())
