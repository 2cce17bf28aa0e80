"""Programs for Horovod, as they are: `python -m hvlike horovod`, install(), and horovod.run."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.job import CHECKOUT, MODULE, job_environment, run_job

PROGRAMS = CHECKOUT / "tests" / "support" / "horovod"

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]


def test_a_program_finds_what_it_imports_and_touches() -> None:
    job = run_job(MODULE, 2, args=["horovod", str(PROGRAMS / "program.py"), "--epochs", "2"], timeout=100).check()
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2: well", "rank 1 of 2: well"]
    assert job.stderr.count("HVLIKE_GRADIENTS=horovod") == 1


@pytest.mark.skipif(find_spec("cloudpickle") is None, reason="a function of the program itself needs cloudpickle")
def test_ranks_of_horovod_run_find_horovod_too() -> None:
    command = [sys.executable, str(PROGRAMS / "launching.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=job_environment({}))
    assert done.stdout.splitlines()[-1:] == ["[(0, 2, 0.5), (1, 2, 0.0)]"], done.stderr


def test_the_command_says_how_it_is_used() -> None:
    command = [sys.executable, "-m", "hvlike", "horovod"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: mpirun -n 4 python -m hvlike horovod [-m MODULE | SCRIPT] [ARGUMENT ...]" in done.stderr
