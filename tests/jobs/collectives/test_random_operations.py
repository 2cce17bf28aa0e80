"""Thousands of random operations on four ranks: all results right, nothing left over, memory flat.

random_operations.py takes a larger number by hand: 10 000 take half a minute.
"""

import json

import pytest
from support.job import CHECKOUT, run_job

COUNT = 2_000
RANKS = 4
GROWTH_MIB = 10.0
"""Of resident memory, in the last two thirds, in which about twelve process sets come and go."""


@pytest.mark.in_turn(2, of=5)
def test_random_operations() -> None:
    # A table of descriptions that is full before memory is measured first.
    env = {"HVLIKE_CACHE_CAPACITY": "256"}
    job = run_job(CHECKOUT / "tests" / "support" / "soak" / "random_operations.py", RANKS, args=[str(COUNT)], env=env)
    assert job.returncode == 0, job.describe()
    reports = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == RANKS, job.describe()
    for report in reports:
        assert report["operations"] >= COUNT
        assert report["errors"] > 25
        assert report["sets"] > 10
        assert report["joins"] > 5
        assert report["left over"] == {}, job.describe()
        assert report["growth"] < GROWTH_MIB, job.describe()
