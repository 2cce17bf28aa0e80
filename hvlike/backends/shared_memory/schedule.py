"""Which chunks a reduction is cut into and which rank owns each. Pure functions over integers.

lengths 1, 10, 2    two ranks, chunks of up to 4 elements, tensors of fewer than 3 are short

owner 0    (0, 0, 1) (2, 0, 2)     (1, 4, 8)          a run is (tensor, start, stop)
owner 1    (1, 0, 4)               (1, 8, 10)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHUNK_BYTES = 256 * 1024  # Fits in a second-level cache together with its copies; 128 KiB to 512 KiB measured the same
SMALLEST_CHUNK_BYTES = 32 * 1024
SMALLEST_SHARE = 16 * 1024  # Less is not worth sharing among the ranks
SLOTS = 2  # How many chunks a rank may have staged for one owner; a third gained nothing
Run = tuple[int, int, int]


MOST_TOGETHER = 1024  # Tensors of one chunk: as many as the system takes in one call (UIO_MAXIOV)


class Chunk(NamedTuple):
    """Elements that the rank `owner` of the node reduces: a part of one tensor, or several short tensors."""

    runs: tuple[Run, ...]
    owner: int

    @property
    def elements(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)


def chunk_bytes(ranks: int, budget: int) -> int:
    """Bytes of a chunk, a power of two, such that a rank's slots for its peers stay within `budget`, if possible."""
    size = CHUNK_BYTES
    while size > SMALLEST_CHUNK_BYTES and size * SLOTS * (ranks - 1) > budget:
        size //= 2
    return size


def fitting(total: int, largest: int, smallest: int, ranks: int) -> int:
    """Elements of a chunk such that every rank owns one of a short work: total / ranks between the two bounds."""
    return min(largest, max(smallest, -(-total // ranks)))


def cut(lengths: Sequence[int], elements: int) -> list[Run]:
    return [
        (tensor, start, min(start + elements, length))
        for tensor, length in enumerate(lengths)
        for start in range(0, length, elements)
    ]


def cut_together(lengths: Sequence[int], elements: int, short: int, together: int, most: int) -> list[list[Run]]:
    """Cut tensors into chunks of several runs: long ones as `cut` does, short ones whole and together.

    short: tensors of fewer elements share chunks of up to `together` elements and `most` tensors; a tensor that is
    longer than `together` has a chunk of its own. These chunks come first: the last ones are those that one rank takes
    from another (WorkStealing). Empty tensors are left out.
    """
    chunks: list[list[Run]] = []
    filled = together
    for tensor, length in enumerate(lengths):
        if 0 < length < short:
            if filled + length > together or len(chunks[-1]) == most:
                chunks.append([])
                filled = 0
            chunks[-1].append((tensor, 0, length))
            filled += length
    return chunks + [[run] for run in cut(lengths, elements) if lengths[run[0]] >= short]


def deal(lengths: Sequence[int], ranks: int, largest: int, smallest: int, short: int) -> list[Chunk]:
    """Cut tensors into chunks and deal them to the ranks in turn; those of fewer than `short` elements share chunks."""
    elements = fitting(sum(length for length in lengths if length >= short), largest, smallest, ranks)
    together = fitting(sum(length for length in lengths if length < short), largest, smallest, ranks)
    groups = cut_together(lengths, elements, short, together, MOST_TOGETHER)
    return [Chunk(tuple(runs), number % ranks) for number, runs in enumerate(groups)]


def assign(lengths: Sequence[int], owners: Sequence[int], elements: int) -> list[Chunk]:
    """Cut tensors for their owners; the first chunk of each owner comes first, so that all are busy at once."""
    counts: dict[int, int] = {}
    ordered = []
    for tensor, start, stop in cut(lengths, elements):
        owner = owners[tensor]
        ordered.append((counts.setdefault(owner, 0), owner, tensor, start, stop))
        counts[owner] += 1
    return [Chunk(((tensor, start, stop),), owner) for _, owner, tensor, start, stop in sorted(ordered)]
