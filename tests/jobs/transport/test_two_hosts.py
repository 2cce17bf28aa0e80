"""Jobs on several hosts: real TCP between them, no shared memory, different host names."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import hosts, main

NETWORK_LAWS = Path(__file__).parents[2] / "ranks" / "backends" / "test_network.py"

RUN_PYTEST = """
import os, sys
import pytest
os.chdir({root!r})
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""

PLACES = """
import hvlike as hvd
hvd.init()
places = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print("places", *places, flush=True)
hvd.shutdown()
"""

COLLECTIVES = """
import time
import torch
import hvlike as hvd
from hvlike.collectives.session.context import current
hvd.init()
rank, size = hvd.rank(), hvd.size()

for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.complex64):
    for length in (0, 1, 1000, 300_001):
        values = torch.arange(length).remainder(7).to(dtype)
        total = hvd.allreduce(values * (rank + 1), op=hvd.Sum)
        assert torch.equal(total, values * sum(range(1, size + 1))), (dtype, length)
        mean = hvd.allreduce(values * size, op=hvd.Average, prescale_factor=2.0)
        assert torch.equal(mean, values * size * 2), (dtype, length)

large = torch.full((1000,), 60000.0, dtype=torch.float16)
assert (hvd.allreduce(large) == 60000.0).all()

values = torch.full((9_000_000,), float(rank))
assert (hvd.allreduce(values, op=hvd.Max) == size - 1).all()
assert (hvd.allreduce_(values, op=hvd.Min) == 0).all()

# The values above were enough for several waves between nodes. Small whole numbers are exact in bfloat16 too.
values = torch.full((3_000_000,), float(rank + 1), dtype=torch.bfloat16)
assert (hvd.allreduce_(values, op=hvd.Sum) == sum(range(1, size + 1))).all()

names = [f"t{index}" for index in range(20)]
handles = {name: hvd.allreduce_async(torch.full((index * 1000 + 1,), float(rank)), op=hvd.Sum, name=name)
           for index, name in (list(enumerate(names)) if rank % 2 else list(enumerate(names))[::-1])}
for name in names:
    assert (hvd.synchronize(handles[name]) == sum(range(size))).all()

noise = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
summed = hvd.allreduce(noise, op=hvd.Sum)
assert torch.equal(hvd.broadcast(summed, root_rank=0), summed)
assert (hvd.broadcast(torch.full((1_000_000,), float(rank)), root_rank=size - 1) == size - 1).all()

hvd.barrier()
used = time.process_time()
if rank == 0:
    time.sleep(0.5)
hvd.barrier()
# Where ranks share cores, who waits for another host leaves them to others.
assert not current().fabric.spin.crowded or time.process_time() - used < 0.25
print("all well", flush=True)
hvd.shutdown()
"""

LEARN = """
import torch
import hvlike as hvd
hvd.init()
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.Tanh(), torch.nn.Linear(900, 1)).to(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 300).to(dtype)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        same = hvd.broadcast(parameter.detach().clone(), root_rank=0, name=f"check {dtype} {name}")
        assert torch.equal(same, parameter), name
print("all well", flush=True)
hvd.shutdown()
"""

CALLS = """
import torch
import hvlike as hvd
from hvlike import rpc
hvd.init()
rank, size = hvd.rank(), hvd.size()
rpc.init_rpc(f"worker{rank}")

def onward(path, tensor):
    return rpc.rpc_sync(path[0], onward, (path[1:], tensor + 1)) if path else tensor + 1

around = [(rank + step) % size for step in range(1, size + 1)]
for length in (0, 10, 2_000_000):
    assert (rpc.rpc_sync(around[0], onward, (around[1:], torch.zeros(length))) == size).all()
futures = [rpc.rpc_async(each % size, torch.add, (torch.ones(100), each)) for each in range(100)]
assert all((answer == 1 + each).all() for each, answer in enumerate(torch.futures.wait_all(futures)))
reference = rpc.remote(around[0], torch.ones, ((1000,),))
assert rpc.rpc_sync(around[-2], torch.sum, (torch.ones(7),)) == 7
assert rpc.rpc_sync(around[-2], rpc.RRef.to_here, (reference,)).sum() == 1000
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
rpc.shutdown()
print("all well", flush=True)
hvd.shutdown()
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("count", [2, 3], ids=["2 hosts", "3 hosts"])
def test_network_laws_between_hosts(count: int) -> None:
    program = RUN_PYTEST.format(root=str(NETWORK_LAWS.parents[3]))
    with hosts(count) as machines:
        # These ranks are not those of the outer run: they keep no records.
        env = {"HVLIKE_TEST_RECORDS": ""}
        machines.run(
            program, 1, args=[str(NETWORK_LAWS), "-k", "float32 or float16 or gather"], env=env, timeout=110
        ).check()


def test_hosts_are_removed_whatever_happens() -> None:
    with contextlib.suppress(RuntimeError), hosts() as machines:
        job = machines.start("import time; print('up', flush=True); time.sleep(600)", 1)
        job.wait_for_output("up")
        raise RuntimeError("the test failed")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in machines.names)
    with job:
        ended = job.wait(timeout=10)
    assert ended.returncode
    assert not ended.survivors


# rank, size, local rank, local size, cross rank, cross size
PLACES_OF = {
    (2, 2): [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)],
    (2, 1): [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)],
    (1, 1, 1): [(rank, 3, 0, 1, rank, 3) for rank in range(3)],
}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("ranks_per_host", PLACES_OF, ids=str)
def test_places_collectives_calls_and_training(ranks_per_host: tuple[int, ...]) -> None:
    with hosts(len(ranks_per_host)) as machines:
        job = machines.run(PLACES + COLLECTIVES + CALLS + LEARN, list(ranks_per_host)).check()
    assert job.stdout.count("all well") == 3 * sum(ranks_per_host)
    places = [line.removeprefix("places ") for line in job.stdout.splitlines() if line.startswith("places ")]
    assert sorted(tuple(map(int, line.split())) for line in places) == PLACES_OF[ranks_per_host]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("delay", [0.0, 1e-3], ids=["slow", "slow and far"])
def test_a_slow_link_changes_nothing_but_the_time(delay: float) -> None:
    with hosts(rate="1gbit", delay=delay) as machines:
        machines.run(COLLECTIVES, 1).check()


def test_the_benchmark_meets_gloo_over_the_network_of_the_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    """By the command of scripts/hosts, on a link as slow as asked for."""
    with hosts(rate="1gbit"):
        pass  # Skips the test where there can be none.
    bench = "-m hvlike bench allreduce --json --no-horovod --sizes 1KiB,4MiB --repetitions 3"
    assert main(["2", "1", "--rate", "1gbit", "--", sys.executable, *bench.split()]) == 0
    said = capfd.readouterr().out
    small, large = json.loads(next(line for line in said.splitlines() if line.startswith("{")))["results"]
    assert {"hvlike", "gloo", "MPI_Allreduce"} <= set(small["seconds"])
    # Either way 4 MiB leave each host.
    assert min(large["seconds"][name]["median"] for name in ("hvlike", "gloo", "MPI_Allreduce")) > 30e-3


@pytest.mark.parametrize("arguments", ["2 1", "2 1 --", "0 1 -- true"])
def test_a_command_and_numbers_of_hosts_and_ranks_are_needed(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "expected a number of hosts, a number of ranks on each, and a command after --" in capsys.readouterr().err
