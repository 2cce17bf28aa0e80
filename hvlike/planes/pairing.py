"""Who is combined with whom when any number of contributions become one, two at a time. Pure functions.

Neighbours pair up, the lower one of each pair goes on, and one without a partner waits for the next level:

    count 2   (0 1)                            count 5   (0 1) (2 3)  4       count 7   (0 1) (2 3) (4 5)  6
    count 3   (0 1)  2                                   (0 2)  4                       (0 2) (4 6)
              (0 2)                                      (0 4)                          (0 4)
    count 4   (0 1) (2 3)                      count 6   (0 1) (2 3) (4 5)    count 8   (0 1) (2 3) (4 5) (6 7)
              (0 2)                                      (0 2)  4                       (0 2) (4 6)
                                                         (0 4)                          (0 4)

For powers of two this is the tree of recursive halving; the result is always at 0 after ceil(log2(count)) levels.
"""

from __future__ import annotations


def pair_up(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each level; the second of a pair is used up, the first holds the result of both."""
    levels = []
    left = list(range(count))
    while len(left) > 1:
        levels.append(list(zip(left[::2], left[1::2], strict=False)))
        left = left[::2]
    return levels
