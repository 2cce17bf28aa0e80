"""What a communication hook is given: some gradients as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradBucket:
    """Gradients that are reduced together, in the order in which backward usually finishes them.

    Source: torch.distributed.GradBucket.
    """

    def __init__(self, index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        """gradients: dense ones of one dtype, or a single sparse one."""
        self._index = index
        self._parameters = list(parameters)
        self._shapes = [gradient.shape for gradient in gradients]
        self._last = last
        (first, *others) = gradients
        self._buffer = first if first.is_sparse else torch.cat([each.reshape(-1) for each in (first, *others)])

    def index(self) -> int:
        """Its place among the buckets of the module."""
        return self._index

    def buffer(self) -> Tensor:
        """All its gradients: (N), a copy of this rank's own; or the sparse one, as it is."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another tensor, of as many elements, in the place of the buffer."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter, of its shape."""
        return split(self._buffer, self._shapes)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the same order."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last one of the backward pass."""
        return self._last


def split(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat tensor, of these shapes, one after the other; a sparse one is alone."""
    if buffer.is_sparse:
        return [buffer]
    parts = torch.split(buffer.reshape(-1), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
