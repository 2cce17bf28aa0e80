"""`Compression`, the names a user passes to an optimizer, and the checks of what was passed."""

from __future__ import annotations

from typing import ClassVar

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name
from hvlike.collectives.compression.compressor import (
    NONE,
    CastCompressor,
    Compressor,
    CompressorLike,
    StatefulCompressor,
)
from hvlike.collectives.compression.power_sgd import PowerSGD
from hvlike.collectives.compression.top_k import TopK
from hvlike.errors import UsageError, WrongTypeError


class Compression:
    """The compressors that hvlike has.

    `none` (the default), `fp16` and `bf16` are compressors. `PowerSGD(...)` and `TopK(...)` make a compressor for one
    DistributedOptimizer, which remembers what it did not send.
    Source: horovod.torch.Compression.
    """

    none: ClassVar[Compressor] = NONE
    fp16: ClassVar[Compressor] = CastCompressor(torch.float16)
    bf16: ClassVar[Compressor] = CastCompressor(torch.bfloat16)
    PowerSGD: ClassVar[type[PowerSGD]] = PowerSGD
    TopK: ClassVar[type[TopK]] = TopK


def check_compressor(compression: object) -> CompressorLike:
    """Return `compression`. Raises: UsageError where it cannot compress and decompress."""
    if isinstance(compression, type) and issubclass(compression, StatefulCompressor):
        raise UsageError(
            f"compression must be a compressor, got the class {compression.__name__}; make one: "
            f"{compression.__name__}(...)."
        )
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


def check_compressed_op(compression: object, op: ReduceOp) -> None:
    """Raises: UsageError for a compressor that only knows sums where another op is asked for."""
    if isinstance(compression, StatefulCompressor) and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(
            f"{type(compression).__name__} approximates sums: expected op Average or Sum, got op {op_name(op)}."
        )
