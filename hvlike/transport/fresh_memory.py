"""Memory for what is about to be received.

A large block comes from the system, which clears and maps it page by page when it is first written: with pages of
4 KiB that took as long as the copy from another process (256 MiB to another rank and back: 240 ms, with pages of
2 MiB 132 ms). Smaller blocks malloc takes from what was used before, once it knows that such blocks come and go; until
then it may give each back to the system at once, which shows in the page faults of every message.

Source: madvise(2), mallopt(3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

ALWAYS_MAPPED_BYTES = 32 << 20
"""glibc's malloc maps blocks above this size one by one, whatever was freed before."""

_SMALLEST_MAPPED_BYTES = 128 << 10
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14

_library = ctypes.CDLL(None)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Malloc:
    has_seen_a_large_block = False


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, in huge pages where it is large and the system has them."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if tensor.nbytes >= _SMALLEST_MAPPED_BYTES and not _Malloc.has_seen_a_large_block:
        _Malloc.has_seen_a_large_block = True
        _free_a_large_block()
    if tensor.nbytes > ALWAYS_MAPPED_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Advice: where it is refused (a kernel without huge pages), nothing is lost.
        _library.madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor


def _free_a_large_block() -> None:
    """Have glibc raise its limits for keeping freed memory: they follow the largest mapped block that is freed.

    So they end where they do in any program that frees a block of nearly 32 MiB; where a program has set them itself
    they stay. Nothing touches the block.
    """
    block = torch.empty(ALWAYS_MAPPED_BYTES - (1 << 16), dtype=torch.uint8, device="cpu")
    del block
