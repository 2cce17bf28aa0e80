"""The table of what autotuning may choose from. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BUCKET_BYTES = tuple(mebibytes << 20 for mebibytes in (1, 2, 4, 8, 16, 32, 64, 128))

FIRST_SHARES = (1, 4, 16)
"""The first bucket may be this many times smaller than the others: communication then starts earlier."""

CYCLE_MICROSECONDS = (0, 500, 1000, 2500, 5000)
"""How long the coordinator may gather requests before it answers."""


class Choice(NamedTuple):
    """One setting: whole numbers, so that it travels between ranks without rounding."""

    bucket_bytes: int
    first_bucket_bytes: int
    cycle_microseconds: int

    def describe(self) -> str:
        """bucket 8 MiB, first bucket 2 MiB, cycle time 1 ms"""
        return (
            f"bucket {self.bucket_bytes / (1 << 20):g} MiB, first bucket {self.first_bucket_bytes / (1 << 20):g} MiB, "
            f"cycle time {self.cycle_microseconds / 1000:g} ms"
        )


def make_candidates(start: Choice, total_bytes: int, *, overlaps: bool) -> list[Choice]:
    """All choices that differ in effect for gradients of `total_bytes`, `start` first.

    overlaps: whether reduction runs beside backward; without that the size of the first bucket changes nothing for
    the better and is left out of the search.
    """
    limits = sorted({*BUCKET_BYTES, start.bucket_bytes})
    # The smallest limit that holds everything stands for all larger ones.
    enough = next((limit for limit in limits if limit >= total_bytes), limits[-1])
    sizes = [limit for limit in limits if limit <= enough]
    shares = FIRST_SHARES if overlaps else FIRST_SHARES[:1]
    cycles = sorted({*CYCLE_MICROSECONDS, start.cycle_microseconds})
    table = [Choice(size, size // share, cycle) for size in sizes for share in shares for cycle in cycles]
    return [start, *(each for each in table if each != start)]


def coordinates(choices: Sequence[Choice]) -> list[tuple[float, float, float]]:
    """Places of the choices in a space where equal distances mean equal ratios."""
    return [
        (
            math.log2(each.bucket_bytes),
            math.log2(each.bucket_bytes / each.first_bucket_bytes),
            math.log2(1.0 + each.cycle_microseconds / 500),
        )
        for each in choices
    ]
