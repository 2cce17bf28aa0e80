"""Flat tensors for the way between ranks: each large tensor alone, the small ones of an owner together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvlike.backends.fusion_buffer import SMALL_BYTES
from hvlike.collectives.requests.reduction import Operand
from hvlike.collectives.requests.request import order_in_memory


class _Piece(NamedTuple):
    owner: int
    indices: list[int]
    strides: tuple[int, ...] | None = None
    buffer: Tensor | None = None
    views: tuple[Tensor, ...] = ()


class Packing:
    """Packs tensors of the same shapes and dtypes again and again: parameters, their gradients, buffers."""

    def __init__(self, tensors: Sequence[Tensor], owners: Sequence[int], *, row_by_row: bool = False) -> None:
        """`owners`: by tensor, the rank that sends or gets it. Elements go row by row, or in their order in memory."""
        self._forms = [(each.shape, each.dtype) for each in tensors]
        self._large: list[_Piece] = []
        small: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            if tensor.nbytes < SMALL_BYTES:
                small.setdefault((owner, tensor.dtype), []).append(index)
            else:
                self._large.append(_Piece(owner, [index], None if row_by_row else order_in_memory(tensor)))
        self._small = [(owner, indices) for (owner, _), indices in small.items()]
        self._home: torch.device | None = None
        self._pieces = self._made_for(None)
        self.owners = [piece.owner for piece in self._pieces]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return self._forms == [(each.shape, each.dtype) for each in tensors]

    def pack(
        self, tensors: Sequence[Tensor], *, owner: int | None = None, home: torch.device | None = None
    ) -> list[Operand]:
        """Return the pieces with the tensors in them, on `home`; `owner`: copy only the small tensors of that rank."""
        if home != self._home:
            self._home, self._pieces = home, self._made_for(home)
        operands = []
        for piece in self._pieces:
            if piece.buffer is None:
                operands.append(Operand(tensors[piece.indices[0]], piece.strides, home=home))
                continue
            if owner is None or owner == piece.owner:
                torch._foreach_copy_(list(piece.views), [tensors[index].detach() for index in piece.indices])
            operands.append(Operand(piece.buffer, None, home=home))
        return operands

    def unpack(self, tensors: Sequence[Tensor], operands: Sequence[Operand], owners: Collection[int]) -> None:
        for piece, operand in zip(self._pieces, operands, strict=True):
            if piece.owner not in owners:
                continue
            if piece.buffer is None:
                operand.write_back()
            else:
                torch._foreach_copy_([tensors[index].detach() for index in piece.indices], list(piece.views))

    def _made_for(self, home: torch.device | None) -> list[_Piece]:
        return [self._together(owner, indices, home) for owner, indices in self._small] + self._large

    def _together(self, owner: int, indices: list[int], home: torch.device | None) -> _Piece:
        shapes = [self._forms[index][0] for index in indices]
        # An ordinary tensor also in inference mode: later steps may run outside of it.
        with torch.inference_mode(False):
            sizes = [shape.numel() for shape in shapes]
            buffer = torch.empty(sum(sizes), dtype=self._forms[indices[0]][1], device=home or "cpu")
            views = tuple(part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True))
        return _Piece(owner, indices, None, buffer, views)
