"""Memory for what is about to be received.

A large block comes from the system, which clears and maps it page by page when it is first written: with pages of
4 KiB that took as long as the copy from another process (256 MiB to another rank and back: 240 ms, with pages of
2 MiB 132 ms). Smaller blocks malloc may take from what was used before; they are left as they are.

Source: madvise(2).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

ALWAYS_MAPPED_BYTES = 32 << 20
"""glibc's malloc maps blocks above this size one by one, whatever was freed before."""

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14

_library = ctypes.CDLL(None)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, in huge pages where it is large and the system has them."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.nbytes > ALWAYS_MAPPED_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Advice: where it is refused (a kernel without huge pages), nothing is lost.
        _library.madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor
