"""The order in which the contributions of all ranks are added: the same whichever way a reduction takes.

    ranks         2       3           4                6                        12
    factors       2       3           2, 2             2, 3                     2, 2, 3
    sum           0+1     (0+1)+2     (0+1)+(2+3)      ((0+1)+(2+3))+(4+5)      three groups as of 4, one by one

So a result does not depend on what was measured when the way was chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import BLOCK_BYTES, SCRATCH


@functools.cache
def primes(number: int) -> tuple[int, ...]:
    """The prime factors in rising order."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return (*found, number) if number > 1 else tuple(found)


def fold(pieces: Sequence[Any], add: Callable[[Any, Any], object], radices: Sequence[int] | None = None) -> None:
    """Add the contributions of a group into the first one. radices: the prime factors of their number."""
    for radix in primes(len(pieces)) if radices is None else radices:
        for first in range(0, len(pieces), radix):
            for other in pieces[first + 1 : first + radix]:
                add(pieces[first], other)
        pieces = pieces[::radix]


def combine(arithmetic: Arithmetic, pieces: Sequence[Piece], own: Piece) -> None:
    """Reduce the contributions of all ranks and finish the result in `own`, one of them; the others may be written."""
    radix, *upper = primes(len(pieces))
    if not upper:
        first, *others = pieces
        arithmetic.combine(first, others, () if first is own else [own])
        return
    elements = BLOCK_BYTES // arithmetic.itemsize
    for start in range(0, len(own), elements):
        place, *_ = blocks = [own[start : start + elements], *(each[start : start + elements] for each in pieces)]
        groups = [blocks[first : first + radix] for first in range(1, len(blocks), radix)]
        sums = []
        for number, (first, *others) in enumerate(groups):
            memory = None if isinstance(first, np.ndarray) else SCRATCH.wide(f"sum {number}", len(first))
            sums.append(arithmetic.begin(first, memory))
            for other in others:
                arithmetic.fold(sums[-1], other)
        fold(sums, arithmetic.merge, upper)
        arithmetic.end(sums[0], place)
        if isinstance(place, np.ndarray) and pieces[0] is not own:
            np.copyto(place, sums[0])
