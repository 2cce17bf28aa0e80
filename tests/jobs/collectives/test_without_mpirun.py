"""Without a launcher hvlike is a job of one rank, in which everything works."""

import subprocess
import sys

from support.job import job_environment

PROGRAM = """
import sys
import hvlike as hvd
assert "mpi4py.MPI" not in sys.modules, "import must not start MPI"
import torch
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
leaf = torch.arange(3.0, requires_grad=True)
for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
    assert hvd.allreduce(leaf, op=op, prescale_factor=2, postscale_factor=3).tolist() == [0.0, 6.0, 12.0]
hvd.allreduce(leaf, postscale_factor=3).sum().backward()
assert leaf.grad.tolist() == [3.0] * 3
assert hvd.broadcast(leaf, root_rank=0).tolist() == [0.0, 1.0, 2.0]
handles = [hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3).int()]) for _ in range(3)]
assert [each.tolist() for each in hvd.synchronize(handles[0])] == [[1.0, 1.0], [1, 1, 1]]
hvd.barrier()
hvd.shutdown()
hvd.init()
hvd.barrier()
print("done")
"""


def test_a_job_of_one_rank() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=job_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "done\n")
    # Each start says that nobody else is there.
    advice = "for several, start the program with mpirun -n N python ..."
    lines = found.stderr.splitlines()
    assert lines
    assert all(" INFO: 1 rank on 1 node " in line and line.endswith(advice) for line in lines), found.stderr
