"""What every compressor is: two local steps around one reduction."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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
