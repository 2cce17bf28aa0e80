"""How a sequence of flat pieces is cut into shards and messages, and in which order contributions are added.

pieces        |0 0 0 0 0|1 1|2 2 2 2 2|        lengths 5, 2, 5
shards (2)    |a a a a a a b b b b b b|        6 elements each
shard a       (0, 0, 5) (1, 0, 1)
shard b       (1, 1, 2) (2, 0, 5)
messages of b, at most 4 elements:  [(1, 1, 2) (2, 0, 3)]  [(2, 3, 5)]

The order of a sum is the same whichever way a reduction takes, so no result depends on what was measured:

    ranks         2       3           4                6                        12
    factors       2       3           2, 2             2, 3                     2, 2, 3
    sum           0+1     (0+1)+2     (0+1)+(2+3)      ((0+1)+(2+3))+(4+5)      three groups as of 4, one by one
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import BLOCK_BYTES, SCRATCH


class Run(NamedTuple):
    """Elements `start` to `stop` of piece number `piece`."""

    piece: int
    start: int
    stop: int


Message: TypeAlias = list[Run]  # Runs that travel together, in order


def shards(lengths: Sequence[int], count: int) -> list[list[Run]]:
    """Cut pieces of `lengths` elements, laid end to end, into the runs of `count` shards that differ by at most one
    element.
    """
    total = sum(lengths)
    result: list[list[Run]] = []
    piece = position = 0
    for shard in range(count):
        missing = total * (shard + 1) // count - total * shard // count
        runs: list[Run] = []
        while missing:
            taken = min(missing, lengths[piece] - position)
            if taken:
                runs.append(Run(piece, position, position + taken))
            missing -= taken
            position += taken
            if position == lengths[piece]:
                piece, position = piece + 1, 0
        result.append(runs)
    return result


def messages(runs: Iterable[Run], elements: int) -> list[Message]:
    """Cut the runs of one shard into messages of `elements` elements; the last may be shorter."""
    result: list[Message] = []
    room = 0
    for piece, start, stop in runs:
        while start < stop:
            if not room:
                result.append([])
                room = elements
            taken = min(room, stop - start)
            result[-1].append(Run(piece, start, start + taken))
            start += taken
            room -= taken
    return result


def message_length(message: Iterable[Run]) -> int:
    return sum(run.stop - run.start for run in message)


class PacketSizes(NamedTuple):
    """How a shard is cut into messages: all are numbers of elements."""

    short: int  # Shorter runs are packed
    first: int  # The first message of packed runs
    packed: int  # Others of packed runs
    early: int  # So much of the long runs goes in messages of `eager`, the rest in such of `largest`
    eager: int
    largest: int


def packets_of(runs: Sequence[Run], sizes: PacketSizes) -> tuple[list[Message], list[Message]]:
    """Cut the runs of one shard into messages of short runs, which are packed, and messages of one long run each."""
    short, first, packed, early, eager, largest = sizes
    brief = [run for run in runs if run.stop - run.start < short]
    opening, *_ = messages(brief, first) or [[]]
    rest = [run for run in runs if run.stop - run.start >= short]
    head, *_ = (messages(rest, early) if early else []) or [[]]
    long = [message for run in head for message in messages([run], eager)]
    long += [message for run in _without(rest, message_length(head)) for message in messages([run], largest)]
    return ([opening] if opening else []) + messages(_without(brief, message_length(opening)), packed), long


def _without(runs: Iterable[Run], elements: int) -> Iterable[Run]:
    """The runs without so many elements at their beginning."""
    for piece, start, stop in runs:
        taken = min(elements, stop - start)
        elements -= taken
        if start + taken < stop:
            yield Run(piece, start + taken, stop)


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
