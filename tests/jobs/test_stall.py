"""A rank that keeps the others waiting is named in the log; the job goes on when it comes."""

import pytest
from job import run_job

pytestmark = pytest.mark.job

PROGRAM = """
import time
import torch
import hvlike as hvd

hvd.init()
if hvd.rank() == 1:
    time.sleep(4.0)
total = hvd.allreduce(torch.ones(3), name="late", op=hvd.Sum)
assert torch.equal(total, torch.full((3,), float(hvd.size())))
print(f"rank {hvd.rank()} done", flush=True)
"""


def test_the_log_says_who_waits_in_what_and_who_does_not() -> None:
    job = run_job(PROGRAM, 3, env={"HVLIKE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    assert "rank 0 waits in allreduce 'late', rank 2 waits in allreduce 'late'" in job.stderr
    assert "not waiting with them: rank 1" in job.stderr
    assert job.stdout.count("done") == 3


def test_a_wait_of_ordinary_length_is_not_worth_a_word() -> None:
    job = run_job(PROGRAM, 2).check()
    assert "stalled" not in job.stderr
