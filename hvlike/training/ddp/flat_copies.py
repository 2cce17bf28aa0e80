"""Many small tensors of any dtypes as one piece of bytes that travels in one go; large ones travel as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hvlike.collectives.operand import Operand

SMALL_BYTES = 64 << 10
"""What is copied together; beyond it a copy costs more than a message of its own."""

_ALIGNMENT = 16


class FlatCopies:
    """Pieces of bytes that hold a list of tensors, made for the shapes and dtypes of the first one seen."""

    def __init__(self, tensors: Sequence[Tensor], home: torch.device | None = None) -> None:
        """home: the device that the pieces travel from, None for host memory."""
        self._home = home
        self._forms = _forms(tensors)
        small = [each for each in tensors if each.nbytes <= SMALL_BYTES]
        starts = [0]
        for each in small:
            starts.append(starts[-1] + math.ceil(each.nbytes / _ALIGNMENT) * _ALIGNMENT)
        with torch.inference_mode(False):
            self._together = torch.zeros(starts[-1], dtype=torch.uint8, device=home or "cpu")
            self._views = [
                self._together[start : start + each.nbytes].view(each.dtype).view(each.shape)
                for start, each in zip(starts, small, strict=False)
            ]
        self._small: list[Tensor] = []
        self._large: list[Operand] = []

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the shapes and dtypes this was made for."""
        return self._forms == _forms(tensors)

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces that hold these tensors now, flat."""
        self._small = [each for each in tensors if each.nbytes <= SMALL_BYTES]
        self._large = [Operand(each, None, home=self._home) for each in tensors if each.nbytes > SMALL_BYTES]
        torch._foreach_copy_(self._views, self._small)
        return [self._together, *(each.flat.view(torch.uint8) for each in self._large)]

    def scatter(self) -> None:
        """Give the tensors of the last `gather` what the pieces hold by now."""
        torch._foreach_copy_(self._small, self._views)
        for each in self._large:
            each.write_back()


def _forms(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]
