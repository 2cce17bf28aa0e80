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

    def chunks(self, addresses: Sequence[int], *tables: Sequence[Sequence[tuple[int, int, int]]]) -> list[list[Any]]:
        """The elements of tables of chunks of runs (tensor, start, stop) of tensors that begin at these addresses.

        A chunk of several runs is a list of pieces.
        """
        itemsize, everything = self._itemsize, self._everything
        firsts, found = [], []
        for address in addresses:
            first, odd = divmod(address - _FIRST_ADDRESS, itemsize)
            if odd:
                return [self._odd_chunks(addresses, table) for table in tables]
            firsts.append(first)
        for table in tables:
            chunks: list[Any] = []
            for runs in table:
                if len(runs) == 1:
                    ((tensor, start, stop),) = runs
                    chunks.append(everything[firsts[tensor] + start : firsts[tensor] + stop])
                else:
                    chunks.append([everything[firsts[tensor] + a : firsts[tensor] + b] for tensor, a, b in runs])
            found.append(chunks)
        return found

    def _odd_chunks(self, addresses: Sequence[int], table: Sequence[Sequence[tuple[int, int, int]]]) -> list[Any]:
        """The same where an address is no multiple of the size of an element."""
        pieces = [
            [self.elements(addresses[tensor] + start * self._itemsize, stop - start) for tensor, start, stop in runs]
            for runs in table
        ]
        return [each if len(each) > 1 else each[0] for each in pieces]
