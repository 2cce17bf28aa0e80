"""Shards and messages: tables, and the laws they follow for any lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.backends.network.partition import PacketSizes, Run, message_length, messages, packets_of, shards

LENGTHS = st.lists(st.integers(0, 40), max_size=8)


@pytest.mark.parametrize(
    ("lengths", "count", "expected"),
    [
        ([5, 2, 5], 2, [[(0, 0, 5), (1, 0, 1)], [(1, 1, 2), (2, 0, 5)]]),
        ([7], 3, [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 7)]]),
        ([0, 3, 0], 1, [[(1, 0, 3)]]),
        ([1], 3, [[], [], [(0, 0, 1)]]),
        ([], 2, [[], []]),
    ],
)
def test_table_of_shards(lengths: list[int], count: int, expected: list[list[tuple[int, int, int]]]) -> None:
    assert shards(lengths, count) == expected


@pytest.mark.parametrize(
    ("runs", "elements", "expected"),
    [
        ([(1, 1, 2), (2, 0, 5)], 4, [[(1, 1, 2), (2, 0, 3)], [(2, 3, 5)]]),
        ([(0, 0, 4)], 4, [[(0, 0, 4)]]),
        ([(0, 0, 5)], 2, [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)]]),
        ([], 4, []),
    ],
)
def test_table_of_messages(
    runs: list[tuple[int, int, int]], elements: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    assert messages(runs, elements) == expected


@given(LENGTHS, st.integers(1, 7), st.integers(1, 20))
def test_every_element_travels_once_in_order(lengths: list[int], count: int, elements: int) -> None:
    runs = [run for shard in shards(lengths, count) for message in messages(shard, elements) for run in message]
    visited = [(piece, index) for piece, start, stop in runs for index in range(start, stop)]
    assert visited == [(piece, index) for piece, length in enumerate(lengths) for index in range(length)]
    assert all(start < stop for _, start, stop in runs)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 20))
def test_shards_are_balanced_and_messages_full(lengths: list[int], count: int, elements: int) -> None:
    cut = shards(lengths, count)
    sizes = [message_length(shard) for shard in cut]
    assert max(sizes) - min(sizes) <= 1
    for shard in cut:
        *full, last = [message_length(message) for message in messages(shard, elements)] or [1]
        assert all(length == elements for length in full)
        assert 0 < last <= elements


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([2, 30, 3], ([[(0, 0, 2), (2, 0, 2)], [(2, 2, 3)]], [[(1, 0, 15)], [(1, 15, 30)]])),
        ([9, 9], ([[(0, 0, 4)], [(0, 4, 9), (1, 0, 3)], [(1, 3, 9)]], [])),
        ([12], ([], [[(0, 0, 12)]])),
        # The first 40 elements of long runs in messages of 15, the rest in messages of 20.
        ([50, 10], ([], [[(0, 0, 15)], [(0, 15, 30)], [(0, 30, 40)], [(0, 40, 50)], [(1, 0, 10)]])),
        ([], ([], [])),
    ],
)
def test_short_runs_are_packed_and_long_ones_travel_alone(lengths: list[int], expected: object) -> None:
    runs = [Run(index, 0, length) for index, length in enumerate(lengths)]
    sizes = PacketSizes(short=10, first=4, packed=8, early=40, eager=15, largest=20)
    assert packets_of(runs, sizes) == expected


def test_without_early_messages_long_runs_are_cut_as_long_as_can_be() -> None:
    sizes = PacketSizes(short=10, first=4, packed=8, early=0, eager=15, largest=20)
    assert packets_of([Run(0, 0, 50), Run(1, 0, 3)], sizes) == (
        [[(1, 0, 3)]],
        [[(0, 0, 20)], [(0, 20, 40)], [(0, 40, 50)]],
    )
