"""Two ways to do the same work are tried in turn; then the faster one is taken, and all is tried anew now and then."""

import pytest

from hvlike.backends.shared_memory.algorithm_choice import MOST_KNOWN, PERIOD, ROUNDS, Trial, Trials


def use(trial: Trial, nanoseconds: dict[bool, int]) -> bool:
    """One use; returns the way it took."""
    way, timed = trial.next
    if timed:
        trial.record(nanoseconds[way])
    else:
        trial.pass_by()
    return way


@pytest.mark.parametrize("faster", [False, True])
def test_both_ways_are_tried_in_turn_and_the_faster_one_is_taken(faster: bool) -> None:
    trial, takes = Trial(), {faster: 10, not faster: 11}
    assert [use(trial, takes) for _ in range(2 * ROUNDS)] == [False, True] * ROUNDS
    assert {use(trial, takes) for _ in range(PERIOD - 2 * ROUNDS)} == {faster}


def test_the_first_time_of_each_way_does_not_count() -> None:
    trial = Trial()
    for _ in range(2):
        use(trial, {False: 1, True: 1000})
    for _ in range(2 * ROUNDS - 2):
        use(trial, {False: 3, True: 2})
    assert trial.next == (True, False)


def test_one_slow_use_decides_nothing() -> None:
    trial = Trial()
    for turn in range(2 * ROUNDS):
        use(trial, {False: 3, True: 2000 if turn == 3 else 2})
    assert trial.next == (True, False)


def test_after_many_uses_they_are_tried_anew() -> None:
    trial = Trial()
    for _ in range(PERIOD):
        use(trial, {False: 1, True: 2})
    assert trial.next == (False, True)
    for _ in range(2 * ROUNDS):
        use(trial, {False: 3, True: 2})
    assert trial.next == (True, False)


def test_trials_of_different_work_are_apart_and_the_oldest_are_forgotten() -> None:
    trials = Trials()
    first = trials.of(7)
    for _ in range(2 * ROUNDS):
        use(first, {False: 3, True: 2})
    trials.keep(7, first)
    assert trials.of(7).next == (True, False)
    assert trials.of(8).next == (False, True)
    for number in range(8, 8 + MOST_KNOWN):
        trials.keep(number, Trial())
    assert trials.of(7).next == (False, True)
