"""How parts are joined to buckets: limits, a smaller first bucket, dtypes, groups."""

import pytest

from hvlike.collectives.requests.plan import (
    ACROSS_BUCKET_BYTES,
    DEVICE_BUCKET_BYTES,
    OVERLAPPED_BUCKET_BYTES,
    SINGLE_BUCKET_BYTES,
    choose_sizes,
    fill_buckets,
)

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


ONE_NODE, ALONE, PAIRS = ((0, 1),), ((0,), (1,)), ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("nodes", "overlaps", "slow_network", "expected"),
    [
        (ONE_NODE, True, False, OVERLAPPED_BUCKET_BYTES),
        (ONE_NODE, False, False, SINGLE_BUCKET_BYTES),
        (ALONE, False, False, SINGLE_BUCKET_BYTES),
        (ALONE, True, False, ACROSS_BUCKET_BYTES),
        (ALONE, False, True, ACROSS_BUCKET_BYTES),
        (PAIRS, False, False, ACROSS_BUCKET_BYTES),
    ],
)
def test_buckets_are_small_where_they_start_early_or_several_ranks_of_a_node_cross(
    nodes: tuple[tuple[int, ...], ...], overlaps: bool, slow_network: bool, expected: int
) -> None:
    sizes = choose_sizes(None, None, overlaps=overlaps, nodes=nodes, slow_network=slow_network)
    assert sizes == (expected, expected)


def test_what_the_user_sets_comes_before_what_suits() -> None:
    assert choose_sizes(7, None, overlaps=False, nodes=PAIRS) == (7, 7)
    assert choose_sizes(None, 5, overlaps=False, on_device=True) == (DEVICE_BUCKET_BYTES, 5)
