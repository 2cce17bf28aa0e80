"""A rank with fewer batches than the others: they learn in step() who has left, and the job ends."""

import pytest
from support.job import run_job

PROGRAM = """
import sys
import torch
import hvlike as hvd

hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
batches = 3 if hvd.rank() == 1 else 6
for batch in range(batches):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"rank {hvd.rank()} batch {batch}", flush=True)
"""


@pytest.mark.parametrize(("ranks", "nodes"), [(2, "one"), (3, "several")])
def test_the_others_are_told_who_left(ranks: int, nodes: str) -> None:
    job = run_job(PROGRAM, ranks, env={"HVLIKE_RANKS_PER_NODE": "1"} if nodes == "several" else None, timeout=60)
    assert job.returncode != 0, job.describe()
    assert not job.timed_out, job.describe()
    assert not job.survivors, job.describe()
    assert "Rank 1 has ended its program" in job.stderr, job.describe()
    assert "rank 0 batch 2" in job.stdout
    assert "rank 0 batch 3" not in job.stdout
