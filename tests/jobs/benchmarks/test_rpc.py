"""scripts/bench rpc as a user starts it, and TensorPipe's processes, stopped between their turns."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job
from torch.distributed import rpc as torch_rpc

from benchmarks.rpc_session import TensorPipePair, Trip

COMMAND = "import runpy; runpy.run_module('benchmarks.command', run_name='__main__', alter_sys=True)"

needs_tensorpipe = pytest.mark.skipif(not torch_rpc.is_available(), reason="this torch was built without TensorPipe")


def stopped(pid: int) -> bool:
    end = time.monotonic() + 10
    # The kernel stops a process soon, not at once.
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        if time.monotonic() > end:
            return False
        assert state in "RSD"
    return True


@needs_tensorpipe
def test_the_pair_works_in_its_turns_and_is_stopped_between_them() -> None:
    cores = sorted(os.sched_getaffinity(0))
    pair = TensorPipePair([cores, cores])
    try:
        pids = pair.pids
        assert all(stopped(pid) for pid in pids)
        assert len(pair.measure(Trip(1 << 10))) == 200
        assert all(stopped(pid) for pid in pids)
    finally:
        pair.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@needs_tensorpipe
def test_json_has_all_that_was_measured(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("rpc"))
    assert found["left_out"] == []
    works = ["empty call", "echo of 1 KiB", "1 in flight", "64 in flight", "idle for 0.1 s"]
    assert [each["work"] for each in found["results"]] == works
    for each in found["results"]:
        trip, idle = "size" in each, "seconds" in each
        assert set(each["found"]) == {"hvlike", "TensorPipe"} | ({"MPI"} if trip else set())
        assert each["found"]["hvlike"][0]["median"] > 0
        assert len(each["found"]["hvlike"]) == (2 if idle else 1)
        assert ("hvlike/TensorPipe" in each["ratios"]) is not idle


def test_it_is_for_two_ranks() -> None:
    job = run_job(COMMAND, 1, args=["rpc"], env={"PYTHONPATH": str(CHECKOUT / "scripts")})
    assert job.returncode == 2, job.describe()
    assert "bench rpc is for two ranks: mpirun -n 2 scripts/bench rpc" in job.stderr
