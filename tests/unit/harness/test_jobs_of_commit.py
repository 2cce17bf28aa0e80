"""Which cases of a test marked `in_turn` a whole run tries."""

import pytest
from support.jobs_of_commit import cases_of, is_tried


@pytest.mark.parametrize(("cases", "tried"), [(14, 5), (4, 2), (5, 2), (3, 1), (1, 1)])
def test_commits_in_a_row_come_to_all_cases(cases: int, tried: int) -> None:
    chosen = [cases_of(number, cases, tried) for number in range(cases)]
    assert all(len(each) == tried for each in chosen)
    assert set.union(*chosen) == set(range(cases))


def test_of_fewer_cases_all_are_tried() -> None:
    assert cases_of(7, 2, 5) == {0, 1}


def test_a_test_that_counts_as_one_of_several_is_tried_by_some_commits() -> None:
    tried = [is_tried("a test", number, 1, 2, of=5)[0] for number in range(5)]
    assert sum(tried) == 2
    assert is_tried("a test", 0, 3, 3) == [True] * 3
