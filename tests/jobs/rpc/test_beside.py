"""RPC beside what else a program does: gloo groups, no torch.distributed at all, nothing at all, on up to 8 ranks."""

from pathlib import Path

import pytest
from support.job import run_job

pytestmark = pytest.mark.in_turn(2)

GLOO = """
import sys
import threading
import torch
import torch.distributed as dist
import hvlike as hvd
from hvlike import rpc

(folder,) = sys.argv[1:]
hvd.init()
rank, size = hvd.rank(), hvd.size()

def make(when):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{when}", rank=rank, world_size=size)

def use():
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(size))).all()

def serve(tensor):
    # Group members that meet in handlers of RPC.
    dist.all_reduce(tensor)
    return tensor

def call():
    for other in range(size):
        assert rpc.rpc_sync(other, torch.add, (torch.ones(1000), 1)).sum() == 2000

def keep_calling(stop):
    while not stop.is_set():
        call()

for when in ("before", "after", "during"):
    if when == "before":
        make(when)
        use()
    rpc.init_rpc(f"worker{rank}")
    if when == "before":
        use()
        call()
    elif when == "after":
        call()
        make(when)
    else:
        stop = threading.Event()
        caller = threading.Thread(target=keep_calling, args=(stop,))
        caller.start()
        make(when)
        for _ in range(20):
            use()
        stop.set()
        caller.join()
    use()
    call()
    if rank == 0:
        futures = [rpc.rpc_async(other, serve, (torch.ones(10),)) for other in range(size)]
        assert all((each == size).all() for each in torch.futures.wait_all(futures))
    rpc.shutdown()
    use()
    dist.destroy_process_group()
print("done", flush=True)
"""


def test_a_gloo_group_that_is_made_before_a_session_after_its_begin_and_during_calls(tmp_path: Path) -> None:
    assert run_job(GLOO, 3, args=[str(tmp_path)]).check().stdout.count("done") == 3


EVERYBODY = """
import torch
import torch.distributed as dist
from hvlike import rpc

def meet(path, seen):
    seen = [*seen, rpc.get_worker_info().id]
    return rpc.rpc_sync(path[0], meet, (path[1:], seen)) if path else seen

import hvlike as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
rpc.init_rpc(f"worker{rank}")
futures = [rpc.rpc_async(f"worker{other}", torch.add, (torch.ones(3) * rank, other)) for other in range(size)]
for other, answer in enumerate(torch.futures.wait_all(futures)):
    assert (answer == rank + other).all()
around = [(rank + step) % size for step in range(1, size + 1)]
assert rpc.rpc_sync(around[0], meet, (around[1:], [])) == around
reference = rpc.remote(around[0], torch.ones, ((5,),))
assert reference.rpc_sync().sum() == 5
assert not dist.is_initialized()
rpc.shutdown()
print("done", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 8])
def test_any_number_of_ranks_calls_everybody_without_torch_distributed(ranks: int) -> None:
    assert run_job(EVERYBODY, ranks).check().stdout.count("done") == ranks


IDLE = """
import time
from hvlike import rpc
import hvlike as hvd

hvd.init()
rpc.init_rpc(f"worker{hvd.rank()}")
# All threads have been in use.
for future in [rpc.rpc_async(1 - hvd.rank(), time.sleep, (0.01,)) for _ in range(40)]:
    future.wait()
hvd.barrier()
time.sleep(0.3)
parts = []
# A loaded machine makes each wake-up dearer: one quiet second is enough, a thread that looks on has none.
while len(parts) < 8 and min(parts, default=1.0) >= 0.01:
    used, start = time.process_time(), time.monotonic()
    time.sleep(1.0)
    parts.append((time.process_time() - used) / (time.monotonic() - start))
hvd.barrier()
rpc.shutdown()
print(f"{min(parts):.4%} of a core", flush=True)
assert min(parts) < 0.01, parts
"""


def test_an_idle_worker_uses_less_than_a_hundredth_of_a_core() -> None:
    assert run_job(IDLE, 2).check().stdout.count("of a core") == 2
