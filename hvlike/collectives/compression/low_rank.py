"""Linear algebra of low-rank approximation, with results that do not depend on which rank computes them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 15


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in their own precision, also where the caller computes under autocast."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.mm(left, right)


def subtract_product(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """Subtract `left @ right.T` from `matrix`, in place."""
    with torch.autocast(matrix.device.type, enabled=False):
        matrix.addmm_(left, right.t(), alpha=-1)


def orthonormal(matrix: Tensor, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the columns of (n, r), n >= r, as (n, r).

    Columns that depend on earlier ones, or are zero, give some direction orthogonal to the others. epsilon: a column
    of which the length d is left beside the earlier ones is shortened to d / (d + epsilon), so that a positive
    epsilon lets columns without content vanish.
    """
    basis: Tensor
    basis, triangle = torch.linalg.qr(matrix)
    if epsilon:
        lengths = triangle.diagonal().abs()
        basis = basis * (lengths / (lengths + epsilon))
    return basis.contiguous()


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` of (n, r) and (m, r), by single multiplications and additions in a fixed order.

    A matrix product rounds differently from one processor, thread count or alignment to another; this does not, so
    equal inputs give bitwise equal gradients on every rank.
    """
    rows, columns = len(left), len(right)
    result = torch.empty((rows, columns), dtype=left.dtype, device=left.device)
    terms = right.t().contiguous()
    # A GPU has no use for blocks that fit a cache, and each would cost it some kernels.
    step = max(1, _BLOCK_ELEMENTS // max(1, columns)) if left.is_cpu else max(1, rows)
    scratch = torch.empty((min(step, rows), columns), dtype=left.dtype, device=left.device)
    for start in range(0, rows, step):
        block, factors = result[start : start + step], left[start : start + step]
        torch.mul(factors[:, :1], terms[0], out=block)
        addend = scratch[: len(block)]
        for index in range(1, len(terms)):
            torch.mul(factors[:, index : index + 1], terms[index], out=addend)
            block.add_(addend)
    return result


def random_matrix(shape: tuple[int, int], dtype: torch.dtype, *key: object) -> Tensor:
    """Standard normal numbers that depend on nothing but `key`; torch's own generators are not touched."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
