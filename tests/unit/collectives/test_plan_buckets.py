"""How parts are joined to buckets: limits, a smaller first bucket, dtypes, groups."""

import pytest

from hvlike.collectives.requests.plan import fill_buckets

FLOATS = ("float32",) * 8


@pytest.mark.parametrize(
    ("sizes", "limit", "first", "expected"),
    [
        ([4, 4, 4, 4], 8, None, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], 8, 4, [[0], [1, 2], [3]]),
        ([4, 4, 4, 4], 8, 1, [[0], [1, 2], [3]]),
        ([4, 4, 4, 4], 4, 12, [[0, 1, 2], [3]]),
        ([9, 1, 1], 4, None, [[0], [1, 2]]),
        ([1, 9, 1], 4, 2, [[0], [1], [2]]),
        ([], 4, 2, []),
        ([0, 0, 5], 4, 1, [[0, 1], [2]]),
    ],
)
def test_limits(sizes: list[int], limit: int, first: int | None, expected: list[list[int]]) -> None:
    parts = [[index] for index in range(len(sizes))]
    assert fill_buckets(parts, sizes, FLOATS, limit, first) == expected


def test_the_first_limit_counts_for_the_first_bucket_of_all_dtypes_only() -> None:
    dtypes = ("float32", "float64", "float64", "float64")
    assert fill_buckets([[0], [1], [2], [3]], [4, 4, 4, 4], dtypes, 8, 4) == [[0], [1, 2], [3]]


def test_groups_stay_whole() -> None:
    assert fill_buckets([[0, 2], [1]], [4, 4, 4], FLOATS, 8, 2) == [[0, 2], [1]]
