"""How sparse tensors travel: as the dense ones that they are made of, put together again where the message is opened.

The dense ones stand in the table of the message, right before the row of the sparse one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

SparseRow: TypeAlias = tuple[str, tuple[int, ...], bool, bool]
"""Layout, shape, whether a COO tensor is coalesced, whether it requires grad."""

_COO = "sparse_coo"
LAYOUTS = {getattr(torch, name): name for name in (_COO, "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")}
"""The layouts that travel, and what they are called on the way."""


def take_apart(tensor: Tensor) -> tuple[list[Tensor], SparseRow]:
    """Return the dense tensors that a sparse one is made of, and the rest of it."""
    plain = tensor.detach()
    name = LAYOUTS[tensor.layout]
    shape = tuple(tensor.shape)
    if name == _COO:
        return [plain._indices(), plain._values()], (name, shape, plain.is_coalesced(), tensor.requires_grad)
    if name in ("sparse_csr", "sparse_bsr"):
        indices = [plain.crow_indices(), plain.col_indices()]
    else:
        indices = [plain.ccol_indices(), plain.row_indices()]
    return [*indices, plain.values()], (name, shape, False, tensor.requires_grad)


def assemble(parts: Sequence[Tensor], row: SparseRow) -> Tensor:
    """Put a sparse tensor together."""
    name, shape, coalesced, graded = row
    if name == _COO:
        indices, values = parts
        tensor = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=False, is_coalesced=coalesced, device=values.device
        )
        return tensor.requires_grad_(graded)
    compressed, plain, values = parts
    layout = getattr(torch, name)
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        shape,
        layout=layout,
        check_invariants=False,
        requires_grad=graded,
        device=values.device,
    )
