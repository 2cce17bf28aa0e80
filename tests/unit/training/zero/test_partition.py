"""Parameters are assigned to the ranks by size: the rank that holds least gets the next largest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlike.training.zero.exchange import assign_owners


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_four_sizes_of_torchs_test_give_every_rank_24_elements(ranks: int) -> None:
    sizes = [size for size in (9, 7, 5, 3) for _ in range(ranks)]
    (owners,) = assign_owners([sizes], ranks)
    assert [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)] == [
        24
    ] * ranks


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [
        ([[9, 7, 5, 3]], 2, [[0, 1, 1, 0]]),
        ([[3, 5, 7, 9]], 2, [[0, 1, 1, 0]]),
        ([[4, 4, 4]], 3, [[0, 1, 2]]),
        ([[1]], 4, [[0]]),
        ([[9, 7], [3, 5]], 2, [[0, 1], [0, 1]]),
        ([[2, 2], []], 2, [[0, 1], []]),
    ],
)
def test_examples(groups: list[list[int]], ranks: int, expected: list[list[int]]) -> None:
    assert assign_owners(groups, ranks) == expected


SIZES = st.lists(st.integers(0, 1000), max_size=20)


@settings(max_examples=40)
@given(st.lists(SIZES, max_size=4), st.integers(1, 6))
def test_no_rank_holds_more_than_the_mean_and_one_largest(groups: list[list[int]], ranks: int) -> None:
    owners = assign_owners(groups, ranks)
    held = [0] * ranks
    for sizes, chosen in zip(groups, owners, strict=True):
        for size, owner in zip(sizes, chosen, strict=True):
            held[owner] += size
    largest = max((size for sizes in groups for size in sizes), default=0)
    assert max(held) - min(held) <= largest


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 6))
def test_a_group_that_is_added_moves_nothing(groups: list[list[int]], ranks: int) -> None:
    assert assign_owners(groups, ranks)[:-1] == assign_owners(groups[:-1], ranks)
