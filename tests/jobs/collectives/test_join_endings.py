"""A rank that ends its program inside a Join context: nobody waits for ever, and an exception elsewhere is not lost."""

from support.job import run_job

PROGRAM = """
import sys
import torch
import hvlike as hvd
from hvlike.join import Join

hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
try:
    with Join([optimizer]):
        # Rank 0 is the first to leave the body, rank 1 ends the program, rank 2 fails, rank 3 goes on.
        for batch in range(1 if hvd.rank() == 0 else 9):
            if batch == 3 and hvd.rank() == 1:
                sys.exit(0)
            if batch == 3 and hvd.rank() == 2:
                raise KeyError("of rank 2")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
except Exception as error:
    print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
    raise
"""


def test_each_rank_is_told_and_the_job_ends() -> None:
    job = run_job(PROGRAM, 4, timeout=60)
    assert not job.timed_out, job.describe()
    assert not job.survivors, job.describe()
    assert job.returncode != 0, job.describe()
    said = {line.split(":")[0]: line for line in job.stdout.splitlines() if line.startswith("rank ")}
    assert "rank 1" not in said, job.describe()
    assert said["rank 2"].startswith("rank 2: KeyError: 'of rank 2'"), job.describe()
    for rank in ("rank 0", "rank 3"):
        text = said[rank]
        assert text.startswith((f"{rank}: JoinError: Rank ", f"{rank}: PeerLeftError: ")), job.describe()
