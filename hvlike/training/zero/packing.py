"""The flat pieces that travel: each large tensor alone, the small ones of each owner together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvlike.collectives.operand import Operand
from hvlike.collectives.request import order_in_memory
from hvlike.planes.packing import SMALL_BYTES


@dataclass(frozen=True)
class Piece:
    """A large tensor, or the small ones of one owner with the memory they travel in."""

    owner: int
    places: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    buffer: Tensor | None = None
    views: tuple[Tensor, ...] = ()


class Packing:
    """Packs tensors of the same shapes again and again: parameters or their gradients."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        """owners: the rank that has what the others want, or wants what they have, by parameter."""
        large: list[Piece] = []
        small: dict[tuple[int, torch.dtype], list[int]] = {}
        for place, parameter in enumerate(parameters):
            if parameter.numel() * parameter.element_size() < SMALL_BYTES:
                small.setdefault((owners[place], parameter.dtype), []).append(place)
            else:
                large.append(Piece(owners[place], (place,), order_in_memory(parameter)))
        self._parameters = list(parameters)
        self._large = large
        self._small = [(owner, places) for (owner, _), places in small.items()]
        self._home: torch.device | None = None
        self._pieces = self._made_for(None)
        self.owners = [piece.owner for piece in self._pieces]
        """The owner of each piece."""

    def pack(
        self, tensors: Sequence[Tensor], *, owner: int | None = None, home: torch.device | None = None
    ) -> list[Operand]:
        """Return the pieces; `owner`: of the small tensors only those of this rank matter, None: all of them.

        home: the device that they travel from, None for host memory.
        """
        if home != self._home:
            self._home, self._pieces = home, self._made_for(home)
        operands = []
        for piece in self._pieces:
            if piece.buffer is None:
                operands.append(Operand(tensors[piece.places[0]], piece.strides, home=home))
                continue
            if owner is None or owner == piece.owner:
                torch._foreach_copy_(list(piece.views), [tensors[place].detach() for place in piece.places])
            operands.append(Operand(piece.buffer, None, home=home))
        return operands

    def _made_for(self, home: torch.device | None) -> list[Piece]:
        return [_together(owner, places, self._parameters, home) for owner, places in self._small] + self._large

    def unpack(self, tensors: Sequence[Tensor], operands: Sequence[Operand], owners: Collection[int]) -> None:
        """Put what the pieces of these owners hold back into the tensors."""
        for piece, operand in zip(self._pieces, operands, strict=True):
            if piece.owner not in owners:
                continue
            if piece.buffer is None:
                operand.write_back()
            else:
                torch._foreach_copy_([tensors[place].detach() for place in piece.places], list(piece.views))


def _together(owner: int, places: Sequence[int], parameters: Sequence[Tensor], home: torch.device | None) -> Piece:
    sizes = [parameters[place].numel() for place in places]
    # Kept for steps in other threads, which may not be in the inference mode of this one.
    with torch.inference_mode(False):
        buffer = torch.empty(sum(sizes), dtype=parameters[places[0]].dtype, device=home or "cpu")
    views = tuple(
        part.view(parameters[place].shape) for part, place in zip(torch.split(buffer, sizes), places, strict=True)
    )
    return Piece(owner, tuple(places), None, buffer, views)
