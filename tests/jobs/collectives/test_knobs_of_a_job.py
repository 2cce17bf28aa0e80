"""Knobs that are wrong or different on one rank: every rank raises, none hangs, and init() may be called again."""

import re

import pytest
from support.job import run_job

pytestmark = pytest.mark.in_turn(2)

PROGRAM = """
import os
import sys
import torch
import hvlike as hvd

rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
# Each argument is one start: settings, parted by semicolons.
for argument in sys.argv[1:]:
    settings = [setting.split(":") for setting in argument.split(";")]
    for whose, name, value in settings:
        if whose in (rank, "all"):
            os.environ[name] = value
    try:
        hvd.init()
    except ValueError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        for _, name, _ in settings:
            os.environ.pop(name, None)
        hvd.init()
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
    assert torch.equal(total, torch.full((3,), float(hvd.size())))
    print(f"rank {hvd.rank()} threads {hvd.mpi_threads_supported()}", flush=True)
    hvd.shutdown()
"""

ALONE = """
import hvlike as hvd
try:
    hvd.init()
except ValueError as error:
    print(error)
"""


REFUSED = {
    "1:HVLIKE_CYCLE_TIME:fast": "rank 1: HVLIKE_CYCLE_TIME='fast': expected a number of at least 0.",
    "2:HOROVOD_FUSION_THRESHOLD:7": (
        "The ranks have different knobs: HVLIKE_FUSION_THRESHOLD is 67108864 on ranks 0, 1, 7 on rank 2."
    ),
    "1:HVLIKE_RANKS_PER_NODE:1": "The ranks have different knobs: HVLIKE_RANKS_PER_NODE is unset on ranks 0, 2, 1",
    "all:HVLIKE_THREAD_AFFINITY:0": "rank 0: HVLIKE_THREAD_AFFINITY=0 names 1 cores, but",
}


def test_all_ranks_refuse_what_is_wrong_on_one_and_start_again() -> None:
    ranks = 3
    job = run_job(PROGRAM, ranks, args=list(REFUSED)).check()
    for rank in range(ranks):
        said = re.findall(rf"rank {rank}: UsageError: hvlike: Horovod initialization failed: (.+)", job.stdout)
        assert len(said) == len(REFUSED), job.describe()
        for text, expected in zip(said, REFUSED.values(), strict=True):
            assert text.startswith(expected)
    assert job.stdout.count("threads True") == ranks * len(REFUSED)


def test_settings_that_are_right_are_obeyed() -> None:
    settings = ["all:HOROVOD_THREAD_AFFINITY:0,0", "all:HVLIKE_MPI_THREADS_DISABLE:1", "all:HVLIKE_FUSION_THRESHOLD:0"]
    job = run_job(PROGRAM, 2, args=[";".join(settings)]).check()
    assert job.stdout.count("threads False") == 2


def test_a_job_of_one_refuses_too() -> None:
    job = run_job(ALONE, 1, env={"HVLIKE_AUTOTUNE": "maybe"}).check()
    assert "HVLIKE_AUTOTUNE='maybe': expected 0 or 1." in job.stdout


LOG = """
import logging
import sys
import hvlike as hvd

hvd.init()
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("hvlike"), level)("a word of %s", level)
logging.basicConfig(format="%(name)s of %(rank)s: %(message)s", stream=sys.stdout)
logging.getLogger("hvlike").warning("the program prints")
"""


def test_the_log_of_a_job() -> None:
    own = "hvlike of {}: the program prints"
    calm = run_job(LOG, 2, env={"HVLIKE_LOG_HIDE_TIME": "1"}).check()
    assert "rank 0 INFO: 2 ranks on 1 node" in calm.stderr
    lines = ["rank 0 INFO: a word of info", "rank 0 WARNING: a word of warning", "rank 1 WARNING: a word of warning"]
    others = [line for line in calm.stderr.splitlines() if " on 1 node " not in line]
    assert sorted(others) == [f"hvlike {line}" for line in lines]
    assert sorted(calm.stdout.splitlines()) == [own.format(0), own.format(1)]
    loud = run_job(LOG, 2, env={"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_LOG_HIDE_TIME": "1"}).check()
    for rank in range(2):
        assert f"hvlike rank {rank} DEBUG: a word of debug" in loud.stderr.splitlines()
        assert f"hvlike rank {rank} WARNING: the program prints" in loud.stderr.splitlines()
        assert own.format(rank) in loud.stdout.splitlines()


STARTS = """
import hvlike as hvd
hvd.init()
hvd.shutdown()
"""


def test_a_misspelt_variable_is_named_once_and_the_start_in_one_line() -> None:
    job = run_job(STARTS, 2, env={"HVLIKE_STALL_CHECK_TIME": "5", "HOROVOD_GPU_OPERATIONS": "NCCL"}).check()
    assert job.stderr.count("HVLIKE_STALL_CHECK_TIME is set") == 1
    assert "did you mean HVLIKE_STALL_CHECK_TIME_SECONDS?" in job.stderr
    assert "GPU_OPERATIONS" not in job.stderr
    assert len(re.findall(r"rank 0 INFO: 2 ranks on 1 node \(.+\): shared memory", job.stderr)) == 1, job.stderr
