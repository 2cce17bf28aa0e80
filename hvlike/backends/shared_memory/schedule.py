"""Cutting a list of flat pieces into chunks and giving every chunk an owner. Pure functions over integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHUNK_BYTES = 256 * 1024
"""Fits in a second-level cache together with its copies; 128 KiB to 512 KiB measured the same."""

SMALLEST_CHUNK_BYTES = 32 * 1024
SMALLEST_SHARE = 16 * 1024
"""Less is not worth being shared among the ranks."""

SLOTS = 2
"""How many chunks a rank may have staged for one owner; a third gained nothing."""


class Chunk(NamedTuple):
    """Elements `start` to `stop` of piece number `piece`, reduced by the rank `owner` of the node.

    `turn` counts the chunks of that owner over the life of the region, so it also says which slot is used.
    """

    piece: int
    start: int
    stop: int
    owner: int
    turn: int


def chunk_bytes(ranks: int, budget: int) -> int:
    """Bytes of a chunk such that one rank's slots for all its peers stay within `budget` bytes, if possible.

    ranks: how many share the node. A power of two between SMALLEST_CHUNK_BYTES and CHUNK_BYTES.
    """
    size = CHUNK_BYTES
    while size > SMALLEST_CHUNK_BYTES and size * SLOTS * (ranks - 1) > budget:
        size //= 2
    return size


def fitting(total: int, largest: int, smallest: int, ranks: int) -> int:
    """Elements of a chunk such that every rank owns one of a short work: total / ranks between the two bounds."""
    return min(largest, max(smallest, -(-total // ranks)))


def cut(lengths: Sequence[int], elements: int) -> list[tuple[int, int, int]]:
    """Cut pieces of `lengths` elements into runs of at most `elements`: (piece, start, stop), in order."""
    return [
        (piece, start, min(start + elements, length))
        for piece, length in enumerate(lengths)
        for start in range(0, length, elements)
    ]


def cut_together(
    lengths: Sequence[int], elements: int, short: int, together: int, most: int
) -> list[list[tuple[int, int, int]]]:
    """Cut pieces into chunks of runs (piece, start, stop): long ones as `cut` does, short ones whole and together.

    short: pieces of fewer elements share chunks of up to `together` elements and `most` pieces; they come first, for
    the last chunks of a work are those that a rank takes from another one. Empty pieces are left out.
    """
    chunks: list[list[tuple[int, int, int]]] = []
    filled = together
    for piece, length in enumerate(lengths):
        if 0 < length < short:
            if filled + length > together or len(chunks[-1]) == most:
                chunks.append([])
                filled = 0
            chunks[-1].append((piece, 0, length))
            filled += length
    return chunks + [[run] for run in cut(lengths, elements) if lengths[run[0]] >= short]


def in_rounds(runs: Iterable[tuple[int, int, int]], owners: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Order runs (piece, start, stop) such that the owners of the pieces are busy all at once.

    The first run of each owner, then the second of each, ...; returns (piece, start, stop, owner).
    """
    counts: dict[int, int] = {}
    ordered = []
    for piece, start, stop in runs:
        owner = owners[piece]
        ordered.append((counts.setdefault(owner, 0), owner, piece, start, stop))
        counts[owner] += 1
    return [(piece, start, stop, owner) for _, owner, piece, start, stop in sorted(ordered)]


@dataclass
class Turns:
    """How many chunks each rank of the node has owned so far; the same on every rank at the same point."""

    counts: list[int]
    next_owner: int = 0

    @classmethod
    def start(cls, ranks: int) -> Turns:
        """Nobody has owned anything."""
        return cls([0] * ranks)

    def deal(self, runs: Iterable[tuple[int, int, int]]) -> list[Chunk]:
        """Give the runs to the ranks in turn, going on where the last call stopped.

        Three ranks, five runs, first call: owners 0 1 2 0 1; second call begins with owner 2.
        """
        chunks = []
        for piece, start, stop in runs:
            chunks.append(self._own(piece, start, stop, self.next_owner))
            self.next_owner = (self.next_owner + 1) % len(self.counts)
        return chunks

    def give(self, runs: Iterable[tuple[int, int, int]], owner: int) -> list[Chunk]:
        """Give all runs to one rank."""
        return [self._own(piece, start, stop, owner) for piece, start, stop in runs]

    def split(self, runs: Iterable[tuple[int, int, int, int]], elements: int) -> list[Chunk]:
        """Cut runs (piece, start, stop, owner) into chunks of at most `elements`, owners kept."""
        return [
            self._own(piece, first, min(first + elements, stop), owner)
            for piece, start, stop, owner in runs
            for first in range(start, stop, elements)
        ]

    def advance(self, counts: Sequence[int]) -> list[int]:
        """Give so many chunks to each rank, whichever they are; returns the turns of the first ones."""
        first = self.counts[:]
        for owner, count in enumerate(counts):
            self.counts[owner] += count
        return first

    def _own(self, piece: int, start: int, stop: int, owner: int) -> Chunk:
        turn = self.counts[owner]
        self.counts[owner] += 1
        return Chunk(piece, start, stop, owner, turn)
