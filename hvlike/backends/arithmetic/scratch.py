"""Scratch memory for arithmetic in cache, and a numpy context that never warns.

Scratch is allocated once per thread and reused for every block. numpy (2.0 on) keeps what errstate sets in a context
variable, so a context in which it is set once serves for the life of the process.
"""

from __future__ import annotations

import contextvars
import threading
from typing import Any, TypeVar

import numpy as np
import torch

from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Array

T = TypeVar("T")

BLOCK_BYTES = 1 << 18  # A piece is worked on in blocks of this size: its scratch stays in the second-level cache


def ordinary_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the memory of `array` that may be written in and out of inference mode."""
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
        size = length * dtype.itemsize
        buffer = self._bytes.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._bytes[name] = np.empty(max(size, BLOCK_BYTES), np.uint8)
        view: Array = buffer[:size].view(dtype)
        return view

    def wide(self, name: str, length: int) -> torch.Tensor:
        tensor = self._wide.get(name)
        if tensor is None or tensor.numel() < length:
            tensor = ordinary_tensor(np.empty(max(length, BLOCK_BYTES // 4), np.float32), torch.float32)
            self._wide[name] = tensor
        return tensor[:length]


SCRATCH = Scratch()


class SilentErrstate:
    """Runs functions in which numpy warns of nothing. One thread at a time, not nested."""

    __slots__ = ("run",)

    def __init__(self) -> None:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run  # Calls a function; what it sets in context variables is seen by later calls here only

    def drive(self, coroutine: Coroutine[T]) -> Coroutine[T]:
        """The same coroutine, each of whose steps runs so."""
        step = self.run
        try:
            while True:
                yield step(next, coroutine)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as error:
            coroutine.throw(error)
            raise
