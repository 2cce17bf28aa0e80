"""A distributed optimizer takes no second copy of the gradients: peak memory grows by its buffers alone."""

import json

import pytest
from support.job import run_job

MODEL_MIB = 128

PROGRAM = f"""
import json
import resource
import torch
import hvlike as hvd

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def backward(model):
    sum(parameter.sum() for parameter in model).backward()

hvd.init()
large = [torch.nn.Parameter(torch.zeros(16, 1 << 19)) for _ in range({MODEL_MIB} // 32)]
model = large + [torch.nn.Parameter(torch.zeros(1000)) for _ in range(20)]
plain = torch.optim.SGD(model, lr=0.1, foreach=False)
empty = peak()
for _ in range(2):
    plain.zero_grad()
    backward(model)
    plain.step()
plain.zero_grad()
alone = peak()
optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
for _ in range(3):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
growth = peak() - alone
expected = torch.tensor(-0.1 * 2 - 3 * 0.1 * hvd.size())
assert all(torch.allclose(each, expected.expand_as(each)) for each in model)
print(json.dumps({{"gradients": alone - empty, "growth": growth}}), flush=True)
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("a_node", "growth"), [(2, 8.0), (1, 32.0)], ids=["shared memory", "network"])
def test_the_peak_grows_by_far_less_than_the_gradients(a_node: int, growth: float) -> None:
    """growth: MiB."""
    job = run_job(PROGRAM, 2, env={"HVLIKE_RANKS_PER_NODE": str(a_node)}).check()
    reports = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 2, job.describe()
    for report in reports:
        # What is measured would show a copy: the gradients themselves do.
        assert report["gradients"] > 0.9 * MODEL_MIB, job.describe()
        assert report["growth"] < growth, job.describe()
