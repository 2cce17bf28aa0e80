"""The tree in which contributions are combined: its table, and the laws it follows for any number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.backends.adasum import pair_up


@pytest.mark.parametrize(
    ("count", "levels"),
    [
        (1, []),
        (2, [[(0, 1)]]),
        (3, [[(0, 1)], [(0, 2)]]),
        (4, [[(0, 1), (2, 3)], [(0, 2)]]),
        (5, [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]),
        (6, [[(0, 1), (2, 3), (4, 5)], [(0, 2)], [(0, 4)]]),
        (7, [[(0, 1), (2, 3), (4, 5)], [(0, 2), (4, 6)], [(0, 4)]]),
        (8, [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2), (4, 6)], [(0, 4)]]),
    ],
)
def test_table(count: int, levels: list[list[tuple[int, int]]]) -> None:
    assert pair_up(count) == levels


@given(count=st.integers(1, 5000))
def test_all_become_one_at_the_first_place_in_as_few_levels_as_can_be(count: int) -> None:
    left = set(range(count))
    levels = pair_up(count)
    for pairs in levels:
        used = [position for pair in pairs for position in pair]
        assert len(used) == len(set(used))
        assert left.issuperset(used)
        left -= {second for _, second in pairs}
    assert left == {0}
    assert len(levels) == (count - 1).bit_length()
