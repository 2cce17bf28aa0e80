"""run_job and start_job: output, exit codes, time limits, and nothing left behind."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from support import job as jobs
from support.job import IS_OPEN_MPI, run_job, start_job

HELLO = """
import sys
from mpi4py import MPI
print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} {sys.argv[1:]}")
"""

HANG = """
import time
from mpi4py import MPI
print("started", flush=True)
def the_place_where_it_hangs():
    time.sleep(1000)
the_place_where_it_hangs()
"""


def test_every_rank_runs_and_gets_the_arguments() -> None:
    job = run_job(HELLO, 2, args=["a", "b"]).check()
    assert "rank 0 of 2 ['a', 'b']" in job.stdout
    assert "rank 1 of 2 ['a', 'b']" in job.stdout


def test_a_failed_job_is_reported_with_its_output() -> None:
    job = run_job("import sys; from mpi4py import MPI; print('before', flush=True); MPI.COMM_WORLD.Abort(3)", 2)
    assert job.returncode != 0
    assert not job.timed_out
    with pytest.raises(AssertionError, match="before"):
        job.check()


def test_a_hanging_job_is_ended_and_shows_where_it_hung() -> None:
    with start_job(HANG, 2) as running:
        running.wait_for_output("started")
        job = running.wait(1)
    assert job.timed_out
    assert "the_place_where_it_hangs" in job.stderr


def test_processes_of_a_running_job_are_found_and_can_be_killed() -> None:
    with start_job(HANG, 2) as running:
        running.wait_for_output("started")
        ranks = [pid for pid, line in running.pids().items() if "program.py" in line]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        job = running.wait(20)
    assert job.returncode != 0
    assert job.survivors == ()


def test_a_process_that_outlives_mpirun_is_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SURVIVOR_SECONDS", 0.5)
    program = """
import subprocess
quiet = subprocess.DEVNULL
child = subprocess.Popen(["sleep", "987"], stdout=quiet, stderr=quiet, start_new_session=True)
print("child", child.pid, flush=True)
"""
    job = run_job(program, 1, timeout=20)
    assert [line.strip() for line in job.survivors] == ["sleep 987"]
    child = int(job.stdout.split()[1])
    end = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    """A container without an init process keeps the dead as zombies."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not IS_OPEN_MPI, reason="MPICH leaves no folder")
def test_a_launcher_that_is_killed_leaves_no_folder_to_the_next_one_with_its_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "SURVIVOR_SECONDS", 0.1)
    with start_job(HANG, 1) as running:
        running.wait_for_output("started")
        os.kill(running.launcher_pid, signal.SIGKILL)
        running.wait(20)
        assert not list(Path("/tmp").glob(f"*.{running.launcher_pid}"))
