"""This process's memory as elements of one dtype, for tensors of which only the address is known."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.planes.arithmetic import Arithmetic, Piece
from hvlike.transport.dtypes import bytes_at

_FIRST_ADDRESS = 4096
_EVERYTHING = bytes_at(_FIRST_ADDRESS, 1 << 56)
"""All that could be this process's memory: a slice of it costs a tenth of what it costs to view a tensor anew."""


class OwnMemory:
    """Slices keep none of the memory: the caller holds the tensors that lie there."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._itemsize = arithmetic.itemsize
        self._everything = arithmetic.over(_EVERYTHING)

    def elements(self, address: int, count: int) -> Piece:
        """So many elements from an address on."""
        first, odd = divmod(address - _FIRST_ADDRESS, self._itemsize)
        if odd:
            return self._arithmetic.over(bytes_at(address, count * self._itemsize))
        return self._everything[first : first + count]

    def runs(self, addresses: Sequence[int], runs: Sequence[tuple[int, int, int]]) -> list[Piece]:
        """The elements of runs (piece, start, stop) of pieces that begin at these addresses."""
        itemsize = self._itemsize
        if any((address - _FIRST_ADDRESS) % itemsize for address in addresses):
            return [self.elements(addresses[piece] + start * itemsize, stop - start) for piece, start, stop in runs]
        everything = self._everything
        firsts = [(address - _FIRST_ADDRESS) // itemsize for address in addresses]
        return [everything[firsts[piece] + start : firsts[piece] + stop] for piece, start, stop in runs]
