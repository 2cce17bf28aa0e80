"""python -m hvlike bench rpc as a user starts it, and TensorPipe's processes, stopped between their turns."""

import os
import time
from pathlib import Path

import pytest
from torch.distributed import rpc as torch_rpc

from hvlike.bench.rpc_pair import Pair
from hvlike.bench.rpc_work import Trip

pytestmark = pytest.mark.job

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
    pair = Pair([cores, cores])
    try:
        pids = pair.pids
        assert all(stopped(pid) for pid in pids)
        assert len(pair.measure(Trip(1 << 10))) == 200
        assert all(stopped(pid) for pid in pids)
    finally:
        pair.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
