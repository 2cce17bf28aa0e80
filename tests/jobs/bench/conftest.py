"""The benchmarks as a user starts them, but several in one job: none imports torch for itself."""

from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest
from support.in_turn import Job
from support.job import CHECKOUT, STARTUP

FAKE = CHECKOUT / "tests" / "support" / "fake_horovod"
"""A small stand-in takes the place of Horovod."""
ALLREDUCE = "hvlike bench allreduce --sizes 1KiB,300KiB --repetitions 3"
STEP = "hvlike bench step --models small --repetitions 2"


def jobs(folder: Path) -> list[Job]:
    """All of them."""
    place = quote(str(folder))
    averages = f"{ALLREDUCE} --dtypes bfloat16,float64 --op average --warm --no-gloo --plot {place}/allreduce.png"
    two = {
        "averages": averages,
        "allreduce, bare": f"{ALLREDUCE} --bare --no-gloo --op average --dtypes float32,float64,bfloat16 --json",
        "step, bare": f"{STEP} --no-ddp --bare --json",
        "step": f"{STEP} --no-ddp --no-horovod --plot {place}/step.png",
    }
    three = {"allreduce, 3": f"{ALLREDUCE} --json", "step, 3": f"{STEP} --bucket-view --json"}
    horovod = {
        "horovod, allreduce": "hvlike bench allreduce --sizes 64KiB --repetitions 3 --no-gloo --json",
        "horovod, step": f"{STEP} --no-ddp --json",
    }
    # Else job.py puts the last two on the path of a job.
    beside = Job(2, horovod, PYTHONPATH=f"{FAKE}:{CHECKOUT}:{STARTUP}")
    return [Job(2, two), Job(3, three), Job(1, {"allreduce, 1": f"{ALLREDUCE} --json"}), beside]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the benchmarks leave pictures."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="session")
def output_of(folder: Path) -> Callable[[str], str]:
    """What a benchmark has printed, by its name in jobs()."""
    job_of = {name: job for job in jobs(folder) for name in job.programs}
    return lambda name: job_of[name].output_of(name)
