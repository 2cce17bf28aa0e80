"""A worker whose program never names hvlike.autograd takes part in the backward passes of the others."""

from support.job import run_job

PROGRAM = """
import sys
import torch
import hvlike as hvd
from hvlike import rpc

hvd.init()
rpc.init_rpc(f"worker{hvd.rank()}")
if hvd.rank() == 0:
    from hvlike import autograd

    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 5.0))
        autograd.backward(context_id, [y.sum()])
        print(autograd.get_gradients(context_id)[x].tolist())
rpc.shutdown()
"""


def test_a_worker_that_only_serves_has_its_part_of_the_graph() -> None:
    job = run_job(PROGRAM, 2).check()
    assert job.stdout.split("\n")[0] == "[5.0, 5.0, 5.0]"
