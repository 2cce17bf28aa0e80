"""Process sets whose ranks are on several nodes."""

from support.job import run_job

# Open MPI makes the communicator of a set with messages of its own, which once met those of the channel: the fourth
# or fifth start with several sets across nodes failed.
STARTS = """
import torch
import hvlike as hvd

for _ in range(25):
    hvd.init()
    size = hvd.size()
    hvd.shutdown()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    hvd.init(process_sets=[even, odd, hvd.ProcessSet([size - 1])])
    hvd.allreduce(torch.ones(3), process_set=odd if hvd.rank() % 2 else even)
    hvd.shutdown()
"""


def test_sets_across_nodes_start_again_and_again() -> None:
    run_job(STARTS, 3, env={"HVLIKE_RANKS_PER_NODE": "1"}).check()
