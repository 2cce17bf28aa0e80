"""Checksums of tensors, for warnings and for the check of commits: they look at any tensor, and change none."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hvlike.observe.looking import only_looks
from hvlike.transport.memory.own_memory import has_memory

_SAMPLE = 16  # Elements of each in its checksum: initialisation, or a checkpoint on one rank, changes them all
_UNKNOWN = 0  # Of a tensor that cannot be looked at, on every rank


def value_checksums(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return a checksum of the first elements of each tensor. Local; waits once for each device."""
    numbers = [_UNKNOWN] * len(tensors)
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for index, each in enumerate(tensors):
        sample = _sample(each)
        if sample is not None:
            kinds.setdefault((sample.device, sample.dtype), {})[index] = sample
    for samples in kinds.values():
        together = _bytes_of(torch.cat(list(samples.values())))
        start = 0
        for index, sample in samples.items():
            end = start + sample.numel() * sample.element_size()
            numbers[index] = zlib.crc32(together[start:end])
            start = end
    return tuple(numbers)


@only_looks(_UNKNOWN)
def checksum_of(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's elements, row by row; 0 for a kind of tensor that has no plain memory."""
    return zlib.crc32(_bytes_of(tensor)) if is_plain(tensor) else _UNKNOWN


@only_looks(False)
def is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in memory that can be read: not so of sparse, quantized, nested, meta, fake tensors."""
    return tensor.layout is torch.strided and not tensor.is_quantized and has_memory(tensor)


@only_looks(None)
def _sample(tensor: Tensor) -> Tensor | None:
    if not is_plain(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Not of the whole: a copy of what does not lie row by row would be as large.
    while plain.dim() > 1 and plain.numel() > _SAMPLE and not plain.is_contiguous():
        plain = plain[0]
    return plain.reshape(-1)[:_SAMPLE]


def _bytes_of(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
