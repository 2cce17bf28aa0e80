"""Message buffers that are kept between exchanges: fresh memory costs as much as the arithmetic."""

from __future__ import annotations

import numpy as np

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.transport.dtypes import Array, Kind


class Buffers:
    """Buffers of one size that are taken and given back, and one accumulator."""

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._size = 0
        self._wide: tuple[Kind, Piece] | None = None

    def require(self, size: int) -> None:
        """Have all buffers hold at least `size` bytes. Only while none is taken."""
        if size > self._size:
            self._free.clear()
            self._size = size

    def take(self) -> Array:
        """Return a free buffer of bytes."""
        return self._free.pop() if self._free else np.empty(self._size, np.uint8)

    def give(self, buffer: Array) -> None:
        """Give a buffer back."""
        self._free.append(buffer)

    def accumulator(self, arithmetic: Arithmetic, length: int) -> Piece | None:
        """Return memory for the arithmetic of one message, None where it works in place."""
        key = arithmetic.element.kind
        if self._wide is None or self._wide[0] is not key or len(self._wide[1]) < length:
            memory = arithmetic.accumulator(length)
            if memory is None:
                return None
            self._wide = (key, memory)
        return self._wide[1]
