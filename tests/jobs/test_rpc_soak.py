"""A few thousand calls of all kinds at once on four ranks; rpc_soak.py takes a larger number by hand."""

from pathlib import Path

import pytest
from job import run_job

pytestmark = pytest.mark.job

SOAK = Path(__file__).with_name("rpc_soak.py")


def test_calls_of_all_kinds_leave_nothing_behind() -> None:
    job = run_job(SOAK, 4, args=["4000"]).check()
    assert "all well" in job.stdout, job.describe()
