"""Compressors: what is cast and what passes through, and that they are the same objects after pickling."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hvlike import Compression
from hvlike.collectives.compression import (
    CastCompressor,
    Compressor,
    NoneCompressor,
    check_compressor,
    describe_compressor,
)
from hvlike.errors import UsageError

ALL = [Compression.none, Compression.fp16, Compression.bf16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("compressor", "wire"), [(ALL[1], torch.float16), (ALL[2], torch.bfloat16)])
def test_wide_floats_are_cast_and_cast_back(compressor: Compressor, wire: torch.dtype, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -2.5, 1e-3], dtype=dtype)
    kept = tensor.clone()
    small, ctx = compressor.compress(tensor)
    assert small.dtype is wire
    restored = compressor.decompress(small, ctx)
    assert restored.dtype is dtype
    torch.testing.assert_close(restored, kept, rtol=1e-2, atol=0)
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.complex64]
)
@pytest.mark.parametrize("compressor", ALL)
def test_everything_else_passes_through(compressor: Compressor, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    small, ctx = compressor.compress(tensor)
    assert small is tensor
    assert compressor.decompress(small, ctx) is tensor


@pytest.mark.parametrize("compressor", ALL)
def test_copies_are_equal(compressor: Compressor) -> None:
    for copied in (pickle.loads(pickle.dumps(compressor)), copy.deepcopy(compressor)):
        assert repr(copied) == repr(compressor)
        assert copied is compressor or copied == compressor
    assert pickle.loads(pickle.dumps(Compression.none)) is Compression.none


class ByMethods:
    """Has the methods, does not derive from Compressor."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor + 1, None

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor - 1


def test_what_counts_as_a_compressor() -> None:
    assert check_compressor(Compression.fp16) is Compression.fp16
    for given in (ByMethods(), ByMethods()):
        assert check_compressor(given) is given
        # Compared between ranks: no address in it.
        assert describe_compressor(given).endswith("test_compression.ByMethods")
    assert isinstance(Compression.none, NoneCompressor)
    with pytest.raises(UsageError, match=r"compression must have the methods compress\(tensor\)"):
        check_compressor(torch.float16)
    with pytest.raises(UsageError, match=r"needs a floating dtype to send as, got torch.int8"):
        CastCompressor(torch.int8)


@pytest.mark.parametrize("compressor", ALL)
def test_allreduce_with_compression(hvd: ModuleType, compressor: Compressor) -> None:
    tensor = torch.full((5,), float(hvd.rank() + 1))
    result = hvd.allreduce(tensor, compression=compressor, op=hvd.Sum)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, torch.full((5,), float(sum(range(1, hvd.size() + 1)))), rtol=1e-2, atol=0)
    assert tensor.tolist() == [hvd.rank() + 1.0] * 5
