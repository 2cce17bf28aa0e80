"""Thousands of mixed calls of four ranks, in threads with groups of their own: all right, and nothing left behind.

HVLIKE_TEST_MIXED_OPERATIONS says how many; the suite makes 2000, 10000 take about a minute.
"""

import os
import re

import pytest
from support.job import CHECKOUT, run_job

OPERATIONS = int(os.environ.get("HVLIKE_TEST_MIXED_OPERATIONS", "2000"))

PROGRAM = CHECKOUT / "tests" / "support" / "torch_distributed" / "mixed_operations.py"


@pytest.mark.in_turn(2, of=5)
@pytest.mark.timeout(max(200, OPERATIONS // 20))
def test_mixed_operations_of_four_ranks_in_threads() -> None:
    job = run_job(PROGRAM, 4, args=[str(OPERATIONS)], timeout=max(120, OPERATIONS // 30)).check()
    assert len(re.findall(r"rank \d: wrong 0", job.stdout)) == 4, job.describe()
