"""How tensors get their memory from the system: receive buffers in huge pages, and malloc's limits.

A large block comes from the system, which clears and maps it page by page at the first write. With pages of 4 KiB
that took as long as the copy from another process (256 MiB to another rank and back: 240 ms; with pages of 2 MiB:
132 ms). Smaller blocks come from freed memory, once malloc knows that such blocks come and go; until then each of
them may go back to the system at once, which shows as page faults in every message.

Source: madvise(2), mallopt(3).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch

ALWAYS_MAPPED_BYTES = 32 << 20  # glibc's malloc maps blocks above this size one by one, whatever was freed before
_SMALLEST_MAPPED_BYTES = 128 << 10
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate_receive_buffer(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, in huge pages where it is large and the system has them."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if tensor.nbytes >= _SMALLEST_MAPPED_BYTES:
        _free_a_large_block()
    if tensor.nbytes > ALWAYS_MAPPED_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Advice: where it is refused (a kernel without huge pages), nothing is lost.
        _libc.madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor


@functools.cache
def _free_a_large_block() -> None:
    """Have glibc raise its limits for keeping freed memory, which follow the largest mapped block that is freed; where
    a program has set them itself they stay. Nothing touches the block.
    """
    block = torch.empty(ALWAYS_MAPPED_BYTES - (1 << 16), dtype=torch.uint8, device="cpu")
    del block


logger = logging.getLogger("hvlike")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_NEVER = -1
_LARGEST_BLOCK = 1 << 30
_PAD = 64 << 20


def keep_memory() -> bool:
    """Have malloc keep what is freed from now on, for the life of the process. Local.

    Blocks of 1 GiB and more are still given back. glibc before 2.38 uses an aligned block, which torch asks for, a
    second time only after it has made up to seven others: it takes some steps until nothing is mapped any more.
    Returns False, after a warning, where malloc is not glibc's.
    """
    if not hasattr(_libc, "gnu_get_libc_version"):
        logger.warning("HVLIKE_KEEP_MEMORY=1 has no effect: the C library of this system is not glibc.")
        return False
    _libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    _libc.mallopt(_TOP_PAD, _PAD)
    if not _libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK):
        # Before glibc 2.35 that threshold ends at 32 MiB: then no block at all gets a mapping of its own.
        _libc.mallopt(_MMAP_MAX, 0)
    return True
