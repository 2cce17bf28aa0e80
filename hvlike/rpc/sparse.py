"""How sparse tensors travel: as the dense tensors that they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COMPRESSED = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}


def reduce(tensor: Tensor) -> Any:
    """Return how a tensor that is not strided travels; NotImplemented: as torch has it."""
    plain = tensor.detach()
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        parts = plain._indices(), plain._values(), shape, plain.is_coalesced(), tensor.requires_grad
        return _restore_coo, parts
    name = _COMPRESSED.get(tensor.layout)
    if name is None:
        return NotImplemented
    if name in ("sparse_csr", "sparse_bsr"):
        compressed, indices = plain.crow_indices(), plain.col_indices()
    else:
        compressed, indices = plain.ccol_indices(), plain.row_indices()
    return _restore_compressed, (name, compressed, indices, plain.values(), shape, tensor.requires_grad)


def _restore_coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool, graded: bool) -> Tensor:
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
    return tensor.requires_grad_(graded)


def _restore_compressed(
    name: str, compressed: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], graded: bool
) -> Tensor:
    layout = getattr(torch, name)
    return torch.sparse_compressed_tensor(
        compressed, indices, values, shape, layout=layout, check_invariants=False, requires_grad=graded
    )
