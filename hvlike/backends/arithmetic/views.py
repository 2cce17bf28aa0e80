"""Memory as elements of one dtype: tensors known by their addresses only, and small tensors gathered into scratch.

A Bundle is gathered when the turn of its chunk has come and scattered as soon as the result is in. Both times the
elements are still in the caches; a buffer of all small tensors would go through memory on the way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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


class Bundle:
    """Reduces other tensors of the same shapes each time: those that `tensors` was last set to."""

    __slots__ = ("_views", "tensors")

    def __init__(
        self,
        scratch: torch.Tensor,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
    ) -> None:
        """scratch: flat, of the dtype to reduce in; strides: the order of the elements in it, dense, by tensor."""
        self.tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        start = 0
        for shape, stride in zip(shapes, strides, strict=True):
            view = scratch.as_strided(shape, stride, start)
            self._views.append(view)
            start += view.numel()

    def gather(self) -> None:
        """Copy the tensors into scratch, cast to its dtype."""
        torch._foreach_copy_(self._views, self.tensors)

    def scatter(self) -> None:
        """Copy what is in scratch back into the tensors."""
        write(self.tensors, self._views)


def write(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target."""
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:
        # It does not write lazy conjugates and negatives; to look for them costs more than they are worth.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
