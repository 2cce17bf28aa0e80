"""Which rank updates which parameter. Pure functions over integers; every rank computes the same."""

from __future__ import annotations

from collections.abc import Sequence


def assign(groups: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Give each parameter an owner so that all ranks hold about as many elements.

    groups: the elements of each parameter, by parameter group. Group by group, the largest parameter first, each goes
    to the rank that holds least so far, the first of them where several do. A group that is added later changes
    nothing before it. Sizes [9, 7, 5, 3] on 2 ranks -> owners [0, 1, 1, 0]: 12 elements each.
    """
    held = [0] * ranks
    result = []
    for sizes in groups:
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            owner = held.index(min(held))
            owners[index] = owner
            held[owner] += sizes[index]
        result.append(owners)
    return result
