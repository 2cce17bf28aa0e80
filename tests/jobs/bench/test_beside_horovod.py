"""Benchmarks with Horovod in a job of its own; a small stand-in takes the place of Horovod."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import CHECKOUT, MODULE, STARTUP, run_job

pytestmark = pytest.mark.in_turn(1)

SHARED_MEMORY = Path("/dev/shm")
OTHERS_SECONDS = 60.0
"""Jobs of other tests have files there meanwhile, which go with them."""

FAKE = CHECKOUT / "tests" / "support" / "fake_horovod"
# Else job.py puts the last two on the path of a job.
PATH = {"PYTHONPATH": f"{FAKE}:{CHECKOUT}:{STARTUP}"}
ALLREDUCE = ["bench", "allreduce", "--sizes", "64KiB", "--repetitions", "3", "--no-gloo", "--json"]


def test_horovod_takes_its_turns_in_an_allreduce(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("horovod, allreduce"))
    assert found["horovod"] == "0.0.fake"
    assert found["left_out"] == ["Without gloo: left out by --no-gloo."]
    (result,) = found["results"]
    assert len(result["seconds"]["Horovod"]["samples"]) == 3
    assert result["ratios"]["Horovod/hvlike"]["of_medians"] > 0


def test_horovod_takes_its_turns_in_a_step(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("horovod, step"))
    (result,) = found["results"]
    assert set(result["seconds"]) == {"no communication", "hvlike", "hvlike DDP", "Horovod"}
    assert set(result["ratios"]) == {"hvlike/hvlike DDP", "hvlike/Horovod"}


def test_a_wrong_result_ends_the_benchmark() -> None:
    before = set(SHARED_MEMORY.iterdir())
    job = run_job(MODULE, 2, args=ALLREDUCE, env={**PATH, "FAKE_HOROVOD_WRONG": "1"})
    assert job.returncode
    assert not job.timed_out
    assert not job.survivors
    assert "Horovod's job, rank 1: HvlikeError: rank 1: Horovod reduced 65536 bytes" in job.stderr
    left, end = set(SHARED_MEMORY.iterdir()) - before, time.monotonic() + OTHERS_SECONDS
    while time.monotonic() < end and any(each.exists() for each in left):
        time.sleep(0.1)
    assert not [each for each in left if each.exists()]


def test_a_horovod_that_does_not_start_is_left_out(tmp_path: Path) -> None:
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torch.py").write_text("raise ImportError('built for another torch')")
    job = run_job(MODULE, 2, args=ALLREDUCE, env={"PYTHONPATH": f"{tmp_path}:{CHECKOUT}:{STARTUP}"}).check()
    found = json.loads(job.stdout)
    assert found["horovod"] is None
    assert "built for another torch" in found["left_out"][1]
    assert set(found["results"][0]["seconds"]) == {
        "hvlike",
        "empty_shared",
        "MPI_Allreduce",
        "read-write pass",
        "pass, shared",
        "memcpy",
    }
