"""What a floating tensor travels as: compressors make it smaller before a reduction and undo that afterwards.

A compressor is anything with the two methods of `Compressor`: an object, or a class with two static methods as
in Horovod. Being an object gives state (error feedback, say) a home.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

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
    """Tensors travel as they are."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _named, ("none",)


class CastCompressor(Compressor):
    """Floating tensors wider than `wire_dtype` travel as `wire_dtype`; all others pass through.

    Sums are still accumulated in float32 by the reduction; only what travels is rounded.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        if not wire_dtype.is_floating_point:
            raise UsageError(f"CastCompressor needs a floating dtype to send as, got {wire_dtype}.")
        self.wire_dtype = wire_dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return `tensor` cast to the wire dtype and the dtype it had; unchanged and None if it passes through."""
        dtype = tensor.dtype
        if not dtype.is_floating_point or dtype.itemsize <= self.wire_dtype.itemsize:
            return tensor, None
        return tensor.to(self.wire_dtype), dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return `tensor` cast back to the dtype in `ctx`."""
        return tensor if ctx is None else tensor.to(ctx)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.wire_dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wire_dtype})"


class Compression:
    """The compressors at hand: `none` (the default), `fp16` and `bf16`. Source: horovod.torch.Compression."""

    none: ClassVar[Compressor] = NoneCompressor()
    fp16: ClassVar[Compressor] = CastCompressor(torch.float16)
    bf16: ClassVar[Compressor] = CastCompressor(torch.bfloat16)


class AdaptedCompressor(Compressor):
    """A compressor that does not derive from Compressor, shown by a text that is the same on every rank."""

    def __init__(self, inner: CompressorLike) -> None:
        self.inner = inner

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """See the inner one."""
        return self.inner.compress(tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """See the inner one."""
        return self.inner.decompress(tensor, ctx)

    def __repr__(self) -> str:
        described = self.inner if isinstance(self.inner, type) else type(self.inner)
        return f"{described.__module__}.{described.__qualname__}"


def check_compressor(compression: object) -> Compressor:
    """Return `compression` as a Compressor, if it can compress and decompress.

    Raises: UsageError otherwise; the text says what was expected.
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, CompressorLike):
        return AdaptedCompressor(compression)
    raise UsageError(
        f"compression must have the methods compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx), like "
        f"hvlike.Compression.none, .fp16 and .bf16; got {compression!r}."
    )


def _named(name: str) -> Compressor:
    """Return the compressor of this name: what a pickled one becomes again, so that `is Compression.none` holds."""
    compressor: Compressor = getattr(Compression, name)
    return compressor
