"""Ten thousand random operations on four ranks: all results right, nothing left over, memory flat."""

import json
from pathlib import Path

import pytest
from job import run_job

pytestmark = pytest.mark.job

COUNT = 10_000
RANKS = 4
GROWTH_MIB = 10.0
"""Of resident memory, in the last two thirds, in which about fifty process sets come and go."""


@pytest.mark.timeout(300)
def test_ten_thousand_operations() -> None:
    # A table of descriptions that is full before memory is measured first.
    env = {"HVLIKE_CACHE_CAPACITY": "256"}
    job = run_job(Path(__file__).with_name("random_operations.py"), RANKS, args=[str(COUNT)], timeout=240, env=env)
    assert job.returncode == 0, job.describe()
    reports = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == RANKS, job.describe()
    for report in reports:
        assert report["operations"] >= COUNT
        assert report["errors"] > 100
        assert report["sets"] > 20
        assert report["joins"] > 20
        assert report["left over"] == {}, job.describe()
        assert report["growth"] < GROWTH_MIB, job.describe()
