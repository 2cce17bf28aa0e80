"""A rank that waits for one that has left gets an error within seconds, in whatever way it waits and the other left.

One job for each way to leave; in it threads wait in every way at once when rank 1 leaves. Rank 1 coordinates the set
[1, 3]: there nobody is left who could answer.
"""

import pytest
from support.job import run_job

PROGRAM = """
import sys, threading, time
import torch
import hvlike as hvd
from hvlike import rpc
from hvlike.errors import HorovodInternalError, RpcError

pair = hvd.ProcessSet([1, 3])
hvd.init(process_sets=[pair, hvd.ProcessSet([0, 2])])
rank = hvd.rank()
rpc.init_rpc(f"w{rank}")

def trained(name, process_set=None):
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(name), process_set=process_set
    )

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step

small, small_pair = torch.ones(8), torch.ones(8)
step = trained("everyone")
for _ in range(8):
    hvd.allreduce_(small)
if pair.included():
    step_pair = trained("pair", pair)
    for _ in range(8):
        hvd.allreduce_(small_pair, process_set=pair)
ways = {
    0: {
        "inline": lambda: hvd.allreduce_(small),
        "negotiated": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(4), name="negotiated")),
        "planned": step,
        "barrier": hvd.barrier,
        "object": lambda: hvd.allgather_object(rank, name="object"),
        "rpc": lambda: rpc.rpc_sync("w1", time.sleep, args=(60,)),
    },
    2: {"join": hvd.join},
    3: {
        "inline": lambda: hvd.allreduce_(small_pair, process_set=pair),
        "negotiated": lambda: hvd.broadcast(torch.ones(4), 1, name="negotiated", process_set=pair),
        "planned": step_pair if rank == 3 else None,
        "barrier": lambda: hvd.barrier(process_set=pair),
        "object": lambda: hvd.broadcast_object(None, 1, name="object", process_set=pair),
        "rpc": lambda: rpc.rpc_sync("w1", time.sleep, args=(60,)),
    },
}

def wait(name, call):
    started = time.monotonic()
    try:
        call()
        said = "nothing"
    except (HorovodInternalError, RpcError) as error:
        said = type(error).__name__
        # Afterwards others may have ended, too.
        named = "rank 1" in str(error).lower() or "w1" in str(error) or name == "afterwards"
        said += "" if named else f" that does not name rank 1: {str(error)!r}"
    seconds = time.monotonic() - started
    # In one write: several threads print.
    sys.stdout.write(f"rank {rank} {name}: {said if seconds < 30 else f'{said} after {seconds:.0f} s'}\\n")
    sys.stdout.flush()

hvd.barrier()
if rank == 1:
    time.sleep(2)
    LEAVE
else:
    threads = [threading.Thread(target=wait, args=each) for each in ways[rank].items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A later call finds out at once.
    wait("afterwards", lambda: hvd.allreduce(torch.ones(2), name="afterwards"))
"""

WAYS = {0: ("inline", "negotiated", "planned", "barrier", "object", "rpc"), 2: ("join",)}
WAYS[3] = WAYS[0]


def leave(how: str, *, stall_check: bool = True) -> tuple[dict[str, str], str]:
    """What every wait has ended with, and what the job has said on stderr."""
    environment = {} if stall_check else {"HVLIKE_STALL_CHECK_DISABLE": "1"}
    job = run_job(PROGRAM.replace("LEAVE", how), 4, env=environment, timeout=150).check()
    return dict(line.split(": ", 1) for line in job.stdout.splitlines()), job.stderr


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("how", "error", "stall_check"),
    [("sys.exit(0)", "PeerLeftError", False), ("hvd.shutdown()", "ShutdownError", True)],
    ids=["ended", "shut down"],
)
def test_every_wait_ends_when_a_peer_leaves(how: str, error: str, *, stall_check: bool) -> None:
    said, _ = leave(how, stall_check=stall_check)
    expected = {f"rank {rank} {way}": error for rank, ways in WAYS.items() for way in ways}
    expected |= {f"rank {rank} rpc": "WorkerLostError" for rank in (0, 3)}
    for rank in WAYS:
        # Others may have ended meanwhile, and theirs is the error.
        assert said.pop(f"rank {rank} afterwards") in ("PeerLeftError", "ShutdownError")
    assert said == expected


def test_a_peer_that_raises_ends_the_job() -> None:
    job = run_job(PROGRAM.replace("LEAVE", "raise ValueError('out of data')"), 4, timeout=150)
    assert not job.timed_out, job.describe()
    assert not job.survivors, job.describe()
    assert job.returncode, job.describe()
    assert "rank 1" in job.stderr, job.describe()
    assert "ValueError: out of data" in job.stderr, job.describe()
