"""Ranks whose wrapper drops the launcher's variables are jobs of one rank each: they say so."""

import os
import sys
from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, LAUNCHER, OPEN_MPI_FLAGS, RunningJob, job_environment

PROGRAM = "import hvlike as hvd; hvd.init(); print('size', hvd.size(), flush=True)"
KEPT = ("HOME", "PATH", "PYTHONPATH", "TMPDIR", "OMPI_MCA_pml", "OMPI_MCA_btl")
EMPTY = ["env", "-i", *(f"{name}={os.environ[name]}" for name in KEPT if name in os.environ)]


@pytest.mark.parametrize("wrapper", [EMPTY, ["bash", "-c", '"$@"; exit $?', "bash", *EMPTY]], ids=["env", "bash"])
def test_a_wrapper_that_empties_the_environment(wrapper: list[str], tmp_path: Path) -> None:
    flags = OPEN_MPI_FLAGS if IS_OPEN_MPI else ()
    command = [str(LAUNCHER), *flags, "-n", "2", *wrapper, sys.executable, "-c", PROGRAM]
    with RunningJob(command, job_environment({}), tmp_path) as running:
        job = running.wait()
    assert job.stdout.split() == ["size", "1", "size", "1"], job.describe()
    assert "its variables end at the process" in job.stderr, job.describe()
    assert "--cleanenv" in job.stderr
