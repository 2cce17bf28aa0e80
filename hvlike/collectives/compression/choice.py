"""`Compression`, the names a user passes to an optimizer, and the checks of what was passed."""

from __future__ import annotations

from typing import ClassVar

import torch

from hvlike.collectives.compression.compressor import NONE, CastCompressor, Compressor, CompressorLike
from hvlike.errors import WrongTypeError


class Compression:
    """The compressors that hvlike has.

    `none` (the default), `fp16` and `bf16`.
    Source: horovod.torch.Compression.
    """

    none: ClassVar[Compressor] = NONE
    fp16: ClassVar[Compressor] = CastCompressor(torch.float16)
    bf16: ClassVar[Compressor] = CastCompressor(torch.bfloat16)


def check_compressor(compression: object) -> CompressorLike:
    """Return `compression`. Raises: WrongTypeError where it cannot compress and decompress."""
    if isinstance(compression, (Compressor, CompressorLike)):
        return compression
    raise WrongTypeError(
        f"compression must have the methods compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx), like "
        f"hvlike.Compression.none, .fp16 and .bf16; got {compression!r}."
    )


def describe_compressor(compression: CompressorLike) -> str:
    """Return a text that is the same on every rank that was given the same, which is what ranks compare."""
    if isinstance(compression, Compressor):
        return repr(compression)
    described = compression if isinstance(compression, type) else type(compression)
    return f"{described.__module__}.{described.__qualname__}"
