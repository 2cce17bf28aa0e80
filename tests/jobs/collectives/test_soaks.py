"""The soaks of scripts/soak, which takes larger numbers: all results right, nothing left over, memory that is flat."""

import pytest
from support.job import CHECKOUT, run_job

FOLDER = CHECKOUT / "tests" / "support" / "soak"
# By program: ranks, and how many operations, calls or steps show each kind of them a few times.
SOAKS = {
    "random_operations": (4, 1200),
    "mixed_operations": (4, 1000),
    "rpc_soak": (4, 3000),
    "autograd_soak": (3, 120),
}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", SOAKS)
def test_all_is_well(name: str) -> None:
    ranks, count = SOAKS[name]
    # A table of descriptions that is full before memory is measured first.
    job = run_job(FOLDER / f"{name}.py", ranks, args=[str(count)], env={"HVLIKE_CACHE_CAPACITY": "256"}).check()
    assert "all well" in job.stdout, job.describe()
