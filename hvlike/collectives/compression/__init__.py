"""What a gradient travels as: compressors make it smaller for a reduction and undo that afterwards.

A compressor is anything with the two methods of `Compressor`: an object, or a class with two static methods as
in Horovod.
"""

from hvlike.collectives.compression.choice import Compression, check_compressor, describe_compressor
from hvlike.collectives.compression.compressor import CastCompressor, Compressor, CompressorLike, NoneCompressor

__all__ = ["CastCompressor", "Compression", "Compressor", "CompressorLike", "NoneCompressor"]
__all__ += ["check_compressor", "describe_compressor"]
