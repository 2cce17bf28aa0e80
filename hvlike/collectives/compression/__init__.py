"""What a gradient travels as: compressors make it smaller for a reduction and undo that afterwards.

A compressor is anything with the two methods of `Compressor`: an object, or a class with two static methods as
in Horovod. Those that need more than one round of communication, or a memory, are `StatefulCompressor`s.
"""

from hvlike.collectives.compression.choice import (
    Compression,
    check_compressed_op,
    check_compressor,
    describe_compressor,
)
from hvlike.collectives.compression.compressor import (
    CastCompressor,
    CompressionStats,
    Compressor,
    CompressorLike,
    Exchange,
    Mark,
    NoneCompressor,
    StatefulCompressor,
    merge_marks,
)
from hvlike.collectives.compression.power_sgd import PowerSGD
from hvlike.collectives.compression.top_k import TopK

__all__ = ["CastCompressor", "Compression", "CompressionStats", "Compressor", "CompressorLike", "NoneCompressor"]
__all__ += ["Exchange", "Mark", "PowerSGD", "StatefulCompressor", "TopK", "merge_marks"]
__all__ += ["check_compressed_op", "check_compressor", "describe_compressor"]
