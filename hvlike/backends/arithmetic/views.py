"""Memory of this process as elements of one dtype, for tensors of which only the addresses are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.transport.memory.dtypes import bytes_at

_FIRST_ADDRESS = 4096
_EVERYTHING = bytes_at(_FIRST_ADDRESS, 1 << 56)
"""All that could be this process's memory: a slice of it costs a tenth of what it costs to view a tensor anew."""


class AddressView:
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

    def chunks(self, addresses: Sequence[int], chunks: Sequence[Sequence[tuple[int, int, int]]]) -> list[Any]:
        """The elements of chunks of runs (tensor, start, stop) of tensors that begin at these addresses.

        A list of pieces for a chunk of several runs.
        """
        itemsize = self._itemsize
        if any((address - _FIRST_ADDRESS) % itemsize for address in addresses):
            pieces = [
                [self.elements(addresses[tensor] + start * itemsize, stop - start) for tensor, start, stop in runs]
                for runs in chunks
            ]
            return [each if len(each) > 1 else each[0] for each in pieces]
        everything = self._everything
        found: list[Any] = []
        firsts = [(address - _FIRST_ADDRESS) // itemsize for address in addresses]
        for runs in chunks:
            if len(runs) == 1:
                ((tensor, start, stop),) = runs
                found.append(everything[firsts[tensor] + start : firsts[tensor] + stop])
            else:
                found.append([everything[firsts[tensor] + a : firsts[tensor] + b] for tensor, a, b in runs])
        return found
