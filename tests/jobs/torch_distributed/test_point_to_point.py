"""Point to point in jobs of its own: over the network of several hosts, and with a rank that is killed."""

from pathlib import Path

import pytest
from support.hosts import hosts
from support.job import IS_OPEN_MPI, run_job

PREAMBLE = """
import os, signal, sys, time
import torch
import hvlike as hvd
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError, ShutdownError
from hvlike.torch_distributed.point_to_point import PointToPoint

hvd.init()
rank, size = hvd.rank(), hvd.size()
group = PointToPoint(current().fabric, "job", range(size))
current().departures.listen(group.lose)

def wait(transfer):
    assert current().fabric.loop.wait(lambda: transfer.done, 60), "it hangs"
    if transfer.error is not None:
        raise transfer.error
    return transfer

def error_of(transfer):
    try:
        wait(transfer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def say(text):
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"rank {rank}: {text}\\n")
    sys.stdout.flush()
"""

ALL_PAIRS = """
others = [each for each in range(size) if each != rank]
for elements in (0, 1, 5_000, 20_000, 3_000_000):
    received = {each: torch.zeros(elements) for each in others}
    transfers = [group.recv(received[each], each, 1) for each in others]
    transfers += [group.send(torch.full((elements,), float(rank * size + each)), each, 1) for each in others]
    for transfer in transfers:
        wait(transfer)
    assert all((received[each] == each * size + rank).all() for each in others), elements

# Unmatched on one side for a while, and more of them than MPI takes at once.
if rank == 0:
    transfers = [group.send(torch.full((100_000,), float(number)), size - 1, number % 3) for number in range(30)]
    hvd.barrier()
    for transfer in transfers:
        wait(transfer)
else:
    hvd.barrier()
    if rank == size - 1:
        for tag in (2, 1, 0):
            for number in range(tag, 30, 3):
                tensor = torch.zeros(100_000)
                assert wait(group.recv(tensor, None, tag)).source == 0
                assert (tensor == number).all()

transfers = {}
if rank == 0:
    transfers = {"send": group.send(torch.zeros(500_000), size - 1, 5)}
if rank == size - 1:
    transfers = {"recv": group.recv(torch.zeros(5), 0, 5)}
for what, transfer in transfers.items():
    assert "20 bytes" in error_of(transfer) and "2000000 bytes" in error_of(transfer), what
hvd.barrier()

# Nobody receives it.
unwanted = group.send(torch.zeros(500_000), (rank + 1) % size, 6)
hvd.barrier()
group.close(ShutdownError("the end"))
assert "the end" in error_of(unwanted) or "has destroyed the group" in error_of(unwanted)
say("all is right")
hvd.shutdown()
"""


def test_two_hosts() -> None:
    with hosts(2) as made:
        job = made.run(PREAMBLE + ALL_PAIRS, 2).check()
    assert job.stdout.count("all is right") == 4


KILLED = """
if rank == 1:
    wait(group.send(torch.full((3,), 5.0), 0, 1))
hvd.barrier()
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
pending = {
    "recv": group.recv(torch.zeros(3), 1),
    "any": group.recv(torch.zeros(3), None, 7),
    "large send": group.send(torch.zeros(1_000_000), 1),
}
for what, transfer in pending.items():
    say(f"{what}: {error_of(transfer)}")
say(f"later: {error_of(group.recv(torch.zeros(3), 1))}")
if rank == 0:
    tensor = torch.zeros(3)
    wait(group.recv(tensor, 1, 1))
    say(f"came before: {tensor.tolist()}")
# The other survivor shall not see this one vanish, too.
time.sleep(3)
os._exit(0)
"""


@pytest.mark.skipif(not IS_OPEN_MPI, reason="MPICH has no flag that leaves the other ranks alone")
def test_a_killed_rank_ends_all_that_waits_for_it(tmp_path: Path) -> None:
    # Open MPI's files of ranks that end without MPI's word: not in /dev/shm, where they would stay.
    files = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_job(PREAMBLE + KILLED, 3, env=files, flags=["--enable-recovery"])
    assert not job.timed_out, job.describe()
    assert job.survivors == (), job.describe()
    for rank in (0, 2):
        for what in ("recv", "any", "large send", "later"):
            assert f"rank {rank}: {what}: PeerLeftError: The process of rank 1 has vanished" in job.stdout, (
                job.describe()
            )
    assert "rank 0: came before: [5.0, 5.0, 5.0]" in job.stdout, job.describe()
