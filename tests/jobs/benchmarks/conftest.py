"""The benchmarks for developers, several in one job: none imports torch for itself."""

from collections.abc import Callable

import pytest
from support.in_turn import Job
from support.job import CHECKOUT, STARTUP

PATH = f"{CHECKOUT}:{CHECKOUT}/scripts:{STARTUP}"
COMMAND = "benchmarks.command"
PROGRAMS = {
    "autograd": f"{COMMAND} autograd --repetitions 1 --steps small,unused1 --json",
    "rpc": f"{COMMAND} rpc --sizes 1KiB --repetitions 2 --idle 0.1 --json",
    "backend": f"{COMMAND} backend --sizes 1KiB --ddp small --fsdp small --repetitions 2 --json",
    "zero": f"{COMMAND} zero --width 32 --layers 2 --repetitions 1 --bucket-view --json",
    "kernels": f"{COMMAND} kernels --sizes 64KiB --dtypes float32,bfloat16 --repetitions 2 --json",
    # The last one, as it changes the environment.
    "waiting": f"{COMMAND} waiting --repetitions 1 --json",
}


@pytest.fixture(scope="session")
def output_of() -> Callable[[str], str]:
    """What a benchmark has printed, by its name in PROGRAMS."""
    return Job(2, PROGRAMS, PYTHONPATH=PATH).output_of
