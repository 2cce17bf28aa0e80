"""Compressors: the interface, no compression, and casts to 16 bits.

A compressor has `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`. It keeps nothing from step
to step.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hvlike.errors import UsageError


@runtime_checkable
class CompressorLike(Protocol):
    """The shape of a compressor, whether an object or a class with static methods."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """See Compressor.compress."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """See Compressor.decompress."""


class Compressor:
    """Base of compressors; the methods here change nothing.

    Both methods are local and do not block. Every rank of a reduction must use the same compressor: the dtype and
    shape of what `compress` returns are compared between ranks, its meaning is not.
    Source: horovod.torch.Compressor.
    """

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is to be reduced in place of `tensor`, and a context for `decompress`."""
        return tensor, None

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced `tensor` in the form the original had; `ctx` is what `compress` returned."""
        return tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NoneCompressor(Compressor):
    def __reduce__(self) -> str:
        return "NONE"


class CastCompressor(Compressor):
    """Floating tensors wider than `wire_dtype` travel as `wire_dtype`; all others pass through.

    Sums are still accumulated in float32 by the reduction; only what travels is rounded.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        if not wire_dtype.is_floating_point:
            raise UsageError(f"CastCompressor needs a floating dtype to send as, got {wire_dtype}.")
        self.wire_dtype = wire_dtype

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        passes = not dtype.is_floating_point or dtype.itemsize <= self.wire_dtype.itemsize
        return dtype if passes else self.wire_dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return `tensor` cast to the wire dtype and the dtype it had; unchanged and None if it passes through."""
        dtype = tensor.dtype
        wire = self.cast(dtype)
        return (tensor, None) if wire is dtype else (tensor.to(wire), dtype)

    def decompress(self, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.wire_dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wire_dtype})"


NONE = NoneCompressor()
