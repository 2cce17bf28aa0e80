"""Keeping freed memory in the process: what HVLIKE_KEEP_MEMORY=1 does.

glibc gives every freed block of 32 MiB or more, and often smaller ones, back to the system. A training step asks for
the same blocks again, and each page of them is then cleared and mapped anew, which can cost more than the arithmetic.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import logging

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
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        logger.warning("HVLIKE_KEEP_MEMORY=1 has no effect: the C library of this system is not glibc.")
        return False
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_TOP_PAD, _PAD)
    if not library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK):
        # Before glibc 2.35 that threshold ends at 32 MiB: then no block at all gets a mapping of its own.
        library.mallopt(_MMAP_MAX, 0)
    return True
