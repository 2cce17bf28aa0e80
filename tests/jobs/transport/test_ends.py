"""Some cells of the matrix of ends; which ones changes from commit to commit. All: scripts/ends_of_jobs."""

import random
from itertools import combinations

import pytest
from support.failures.ends import HOW, End, pairs, product, run_end
from support.jobs_of_commit import number_of_commit

TRIED = 4


def chosen(number: int) -> list[End]:
    """Cells of different ways to fail; four commits in a row come to all ways."""
    ways = [HOW[(TRIED * number + place) % len(HOW)] for place in range(TRIED)]
    chance = random.Random(number)
    return [chance.choice([end for end in product() if end.how == way]) for way in ways]


@pytest.mark.parametrize("end", chosen(number_of_commit()), ids=str)
def test_a_job_ends_in_time_with_one_report_and_leaves_nothing(end: End) -> None:
    ended = run_end(end)
    assert not ended.wrong, f"{ended.wrong}\n{ended.text}"


def test_every_pair_of_values_is_tried() -> None:
    tried = {pair for end in pairs() for pair in combinations(enumerate(vars(end).values()), 2)}
    assert tried == {pair for end in product() for pair in combinations(enumerate(vars(end).values()), 2)}


def test_commits_in_a_row_come_to_every_way_to_fail() -> None:
    assert {end.how for number in range(len(HOW)) for end in chosen(number)} == set(HOW)
