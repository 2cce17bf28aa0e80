"""A rank that is lost while the ranks of several nodes make communicators: the others get an error."""

import pytest
from support.job import IS_OPEN_MPI, run_job

PROGRAM = """
import os, signal
from hvlike.transport.failure.fault_tolerance import as_error
from hvlike.transport.world import Group, World

world = World.start(ranks_per_node=1)
members = [0, 1, 2]
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if world.rank in members:
        Group(world, 0, members).connect(by_all=True)
    else:
        Group.stand_by(world, members)
except world.mpi.Exception as error:
    world.job.revoke()
    print(f"rank {world.rank}: {type(as_error(world.mpi, error)).__name__};", flush=True)
# MPI_Finalize would wait for the lost rank now and then; how a job ends without its ranks is tested elsewhere.
os._exit(0)
"""


@pytest.mark.skipif(not IS_OPEN_MPI, reason="the launcher of MPICH ends a job when a rank is lost")
def test_members_and_others_get_an_error() -> None:
    job = run_job(PROGRAM, 4, flags=("--with-ft", "ulfm"), timeout=60)
    for rank in (0, 1, 3):
        assert f"rank {rank}: PeerLeftError;" in job.stdout
