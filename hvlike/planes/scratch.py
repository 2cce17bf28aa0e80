"""Scratch memory for arithmetic in cache: allocated once per thread, reused for every block."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from hvlike.transport.dtypes import Array

BLOCK_BYTES = 1 << 18
"""A piece is worked on in blocks of this size, so that its scratch stays in the second-level cache."""


def ordinary_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the memory of `array` that may be written in and out of inference mode.

    A tensor created under torch.inference_mode() could not be written in place after it ends.
    """
    if not torch.is_inference_mode_enabled():
        return torch.from_numpy(array).view(dtype)
    with torch.inference_mode(False):
        return torch.from_numpy(array).view(dtype)


class Scratch(threading.local):
    """Named scratch arrays of the calling thread. Valid until the same name is asked for again."""

    def __init__(self) -> None:
        self._bytes: dict[str, Array] = {}
        self._wide: dict[str, torch.Tensor] = {}

    def array(self, name: str, dtype: np.dtype[Any], length: int) -> Array:
        """Return an uninitialised 1-D array of `length` elements."""
        size = length * dtype.itemsize
        buffer = self._bytes.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._bytes[name] = np.empty(max(size, BLOCK_BYTES), np.uint8)
        view: Array = buffer[:size].view(dtype)
        return view

    def wide(self, name: str, length: int) -> torch.Tensor:
        """Return an uninitialised 1-D float32 tensor of `length` elements."""
        tensor = self._wide.get(name)
        if tensor is None or tensor.numel() < length:
            tensor = ordinary_tensor(np.empty(max(length, BLOCK_BYTES // 4), np.float32), torch.float32)
            self._wide[name] = tensor
        return tensor[:length]


SCRATCH = Scratch()
