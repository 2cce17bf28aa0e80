"""Which steps are measured, which sizes are tried, and which are the fastest."""

import pytest

from hvlike.collectives.requests.plan import BucketSizes
from hvlike.training.autotune import BUCKET_BYTES, StepSampler, fastest, make_candidates

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


@pytest.mark.parametrize("start", [BucketSizes(8 * MIB, 8 * MIB), BucketSizes(4 * MIB, 4 * MIB), BucketSizes(9, 4)])
def test_the_sizes_in_use_come_first_and_none_comes_twice(start: BucketSizes) -> None:
    table = make_candidates(start)
    assert table[0] == start
    assert len(set(table)) == len(table)
    assert {each.bucket_bytes for each in table} == {start.bucket_bytes, *BUCKET_BYTES}


def test_a_first_bucket_that_is_smaller_stays_so() -> None:
    assert {each.first_bucket_bytes for each in make_candidates(BucketSizes(8 * MIB, 17))} == {17}
    assert all(each.first_bucket_bytes == each.bucket_bytes for each in make_candidates(BucketSizes(3, 3)))


def test_one_lucky_sample_does_not_win() -> None:
    first, second = [3.0, 1.0, 2.0], [3.0, 4.0, 2.0]
    assert fastest(first + second, 3) == 2
