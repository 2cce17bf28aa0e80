"""A few thousand calls of all kinds at once on four ranks; rpc_soak.py takes a larger number by hand."""

import pytest
from support.job import CHECKOUT, run_job

SOAK = CHECKOUT / "tests" / "support" / "soak" / "rpc_soak.py"


@pytest.mark.in_turn(2, of=5)
def test_calls_of_all_kinds_leave_nothing_behind() -> None:
    job = run_job(SOAK, 4, args=["4000"]).check()
    assert "all well" in job.stdout, job.describe()
