"""Which steps are measured, what may be chosen, and how a search ends: pure tables."""

import pytest

from hvlike.training.autotune import Choice, StepSampler, TuningSearch, coordinates, make_candidates

MIB = 1 << 20


def test_the_drawing_in_the_docstring() -> None:
    sampler = StepSampler(3)
    served = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    complete = [sampler.step_ended(count, float(now)) is not None for now, count in enumerate(served)]
    assert [now for now, ended in enumerate(complete) if ended] == [3, 6, 10]


def test_a_sample_is_the_median_of_its_steps() -> None:
    sampler = StepSampler(3)
    ends = [0.0, 1.0, 1.1, 9.0]
    assert [sampler.step_ended(served, now) for served, now in enumerate(ends, 1)] == [None, None, None, 1.0]


def test_what_happens_between_samples_is_not_counted() -> None:
    sampler = StepSampler(1)
    sampler.step_ended(1, 0.0)
    assert sampler.step_ended(2, 2.0) == 2.0
    sampler.resume(10.0)
    assert sampler.step_ended(3, 11.5) == 1.5


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_setting_in_use_comes_first_and_none_comes_twice(overlaps: bool) -> None:
    start = Choice(8 * MIB, 8 * MIB, 0)
    table = make_candidates(start, 100 * MIB, overlaps=overlaps)
    assert table[0] == start
    assert len(set(table)) == len(table) == len(set(coordinates(table)))
    assert any(each.first_bucket_bytes < each.bucket_bytes for each in table) == overlaps


def test_sizes_that_hold_everything_are_one() -> None:
    table = make_candidates(Choice(8 * MIB, 8 * MIB, 0), 3 * MIB, overlaps=True)
    assert {each.bucket_bytes for each in table[1:]} == {1 * MIB, 2 * MIB, 4 * MIB}


def test_a_setting_of_the_user_is_kept_in_the_table() -> None:
    start = Choice(3 * MIB + 1, 17, 1234)
    table = make_candidates(start, 100 * MIB, overlaps=True)
    assert table[0] == start
    assert 3 * MIB + 1 in {each.bucket_bytes for each in table[1:]}


def test_a_search_throws_the_warm_up_away_and_ends() -> None:
    table = make_candidates(Choice(8 * MIB, 8 * MIB, 0), 64 * MIB, overlaps=True)
    decider = TuningSearch(table, warmup=2, samples=5, noise=0.01)
    best = Choice(1 * MIB, 1 * MIB, 0)
    heard = 0
    while not decider.finished:
        choice = decider.choice
        if decider.warming_up:
            assert choice == table[0]
        decider.record(0.001 if decider.warming_up else 0.02 + 0.01 * choice.bucket_bytes / (128 * MIB))
        heard += 1
    assert heard == 7
    assert decider.choice.bucket_bytes <= 8 * MIB
    assert decider.seconds_of(decider.choice) < 0.0208
    assert best in table
