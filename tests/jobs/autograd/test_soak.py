"""A hundred training steps over RPC on three ranks; autograd_soak.py takes a larger number by hand."""

import pytest
from support.job import CHECKOUT, run_job

SOAK = CHECKOUT / "tests" / "support" / "soak" / "autograd_soak.py"


@pytest.mark.in_turn(2, of=5)
def test_steps_of_all_kinds_leave_nothing_behind() -> None:
    job = run_job(SOAK, 3, args=["120"]).check()
    assert "all well" in job.stdout, job.describe()
