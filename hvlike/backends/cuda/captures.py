"""Asking a device beside a CUDA graph that another thread of the process captures.

CUDA forbids questions and allocations to all threads while one captures in the default mode, and a thread that asks all
the same breaks the capture. A thread in the relaxed mode may ask: what it asks for has nothing to do with the capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from hvlike.transport.host.mpi_library import mapped_files

_RELAXED = 2  # cudaStreamCaptureModeRelaxed, and hipStreamCaptureModeRelaxed
# Names of the libraries that torch has loaded, and of the function there.
_LIBRARIES = (
    ("/libcudart.so", "cudaThreadExchangeStreamCaptureMode"),
    ("/libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)

Exchange = Callable[[Any], int]  # Sets the mode of this thread, and leaves the one before in its place


def find_exchange() -> Exchange | None:
    """The function that sets the mode of a thread; None where no library of CUDA or HIP is loaded. Load torch first."""
    for part, name in _LIBRARIES:
        for path in mapped_files(part):
            function: Exchange | None = getattr(ctypes.CDLL(path), name, None)
            if function is not None:
                return function
    return None


class BesideCaptures:
    """Inside of `with`, captures of other threads forbid nothing. One thread at a time; may be nested."""

    __slots__ = ("_before", "_exchange")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._before = ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._exchange(ctypes.byref(self._before))

    def __exit__(self, *_: object) -> None:
        self._exchange(ctypes.byref(self._before))
