"""Some cells of the table of failures; which ones changes from commit to commit. All: `python -m support.failures`."""

import pytest
from support.failures.case import Case
from support.failures.endings import FAILURES, case_of
from support.failures.outcome import run_case
from support.failures.phases import PHASES
from support.failures.surroundings import surroundings
from support.jobs_of_commit import number_of_commit

CELLS = [(phase, ranks) for phase in PHASES for ranks in (2, 3, 4)]
# What the rank prints is cut off by the end of the job when it comes late.
BY_HAND = ("hang with the lock",)


def chosen(number: int) -> list[Case]:
    """Every second way to end, each in another cell, and one case of the surroundings."""
    ways = [failure for failure in FAILURES if failure not in BY_HAND]
    cells = [CELLS[(number // 2 + 5 * place) % len(CELLS)] for place in range(len(ways))]
    tried = list(zip(ways, cells, strict=True))[number % 2 :: 2]
    # Workers that are spawned load torch once more, each of them; ended with the job they leave Python's semaphores.
    others = [
        case
        for case in surroundings()
        if not case.setup and ("spawn" not in case.phase or (case.ranks == 2 and case.ends_well))
    ]
    return [case_of(failure, *cell) for failure, cell in tried] + [others[number % len(others)]]


@pytest.mark.parametrize("case", chosen(number_of_commit()), ids=str)
def test_a_failure_ends_the_job_with_one_report_and_leaves_nothing(case: Case) -> None:
    outcome = run_case(case, timed=False)
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.stderr}"


def test_commits_in_a_row_come_to_every_cell() -> None:
    seen = {(case.failure, case.phase, case.ranks) for number in range(2 * len(CELLS)) for case in chosen(number)[:-1]}
    assert len(seen) == (len(FAILURES) - len(BY_HAND)) * len(CELLS)
