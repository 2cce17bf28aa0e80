"""DataLoader workers that are started anew import the program, and with it mpi4py: they are no ranks."""

import pytest
from support.job import run_job

PROGRAM = """
import os, sys
from mpi4py import MPI
import torch
import hvlike as hvd


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(MPI.Is_initialized()), float("MPI4PY_RC_INITIALIZE" in os.environ)])


if __name__ == "__main__":
    hvd.init()
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1])
    (batch,) = list(loader)
    total = hvd.allreduce(batch[:, 0].sum(), op=hvd.Sum)
    assert "MPI4PY_RC_INITIALIZE" not in os.environ
    print("ranks in workers:", total.item(), flush=True)
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_imports_mpi4py_is_no_rank(method: str) -> None:
    job = run_job(PROGRAM, 2, args=[method], timeout=90).check()
    assert job.stdout.splitlines() == ["ranks in workers: 0.0"] * 2, job.describe()
