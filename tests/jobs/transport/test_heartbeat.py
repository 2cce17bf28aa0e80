"""A cut link, a frozen rank: MPI does not notice, the heartbeat does. A lost rank of another host: the others go on."""

import os
import re
import signal
import time
from collections.abc import Sequence

import pytest
from support.hosts import hosts
from support.job import IS_OPEN_MPI, RunningJob, start_job

PROGRAM = """
import os
import torch
import hvlike as hvd

@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()};", flush=True)
    while state.step < 20 or hvd.size() == state.size:
        assert hvd.allreduce(torch.ones(10), name="sum", op=hvd.Sum)[0] == hvd.size()
        state.step += 1
        state.commit()
    print(f"rank {hvd.rank()} of {hvd.size()} is through", flush=True)

hvd.init()
train(hvd.elastic.ObjectState(step=0, size=hvd.size()))
"""
ENV = {"HVLIKE_HEARTBEAT_SECONDS": "2"}
SURVIVES = ("--with-ft", "ulfm")
pytestmark = [
    pytest.mark.in_turn(2),
    pytest.mark.skipif(not IS_OPEN_MPI, reason="the launcher of MPICH ends a job when a rank is lost"),
]


def test_of_two_halves_that_with_rank_0_trains_on() -> None:
    with hosts(2) as machines, machines.start(PROGRAM, 2, env=ENV, flags=SURVIVES) as job:
        processes = _start(job, 4)
        machines.cut(1)
        for rank in (0, 1):
            job.wait_for_output(f"rank {rank} of 2 is through", 30)
        assert "Nothing was heard of ranks 2, 3 for 2 s" in job.errors()
        # What these would print does not come through.
        _wait_for_end(processes[2:])


def test_a_job_that_cannot_go_on_ends_with_one_report() -> None:
    with hosts(2) as machines, machines.start(PROGRAM, [2, 1], env=ENV) as job:
        processes = _start(job, 3)
        machines.cut(1)
        _wait_for_end(processes)
        assert job.errors().count("Nothing was heard of rank 2 for 2 s") == 1, job.errors()
        assert "of 2 is" not in job.output()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_on_another_host_is_lost_and_the_others_train_on(lost: int) -> None:
    with hosts(2) as machines, machines.start(PROGRAM, 2, env=ENV, flags=SURVIVES) as job:
        processes = _start(job, 4)
        os.kill(processes[lost], signal.SIGKILL)
        for rank in range(3):
            job.wait_for_output(f"rank {rank} of 3 is through", 30)
        assert not job.wait(30).survivors
        assert "goes on with 3 of 4 ranks" in job.errors()


def test_a_stopped_rank_is_killed_and_the_other_trains_on() -> None:
    with start_job(PROGRAM, 2, env=ENV, flags=SURVIVES) as job:
        processes = _start(job, 2)
        os.kill(processes[1], signal.SIGSTOP)
        job.wait_for_output("rank 0 of 1 is through", 30)
        assert f"rank 1 (process {processes[1]}) was stopped (SIGSTOP)" in job.errors()
        assert not job.wait(30).survivors


def _start(job: RunningJob, ranks: int) -> list[int]:
    """The processes of a job that runs, by rank."""
    for rank in range(ranks):
        job.wait_for_output(f"rank {rank} of {ranks} is")
    return [int(re.search(rf"rank {rank} of {ranks} is process (\d+);", job.output())[1]) for rank in range(ranks)]


def _wait_for_end(processes: Sequence[int], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while any(map(_runs, processes)):
        assert time.monotonic() < end, f"processes {[each for each in processes if _runs(each)]} still run"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
