"""Reductions without staging: every chunk by one rank, in the order of the ranks; right on several nodes too."""

from types import ModuleType

import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.transport.loop.coroutine import Coroutine

SUM = Arithmetic(torch.float32, ReduceOp.SUM)


def test_on_any_backend(hvd: ModuleType, ranks_per_node: int | None) -> None:
    tensor = hvd.empty_shared(3 * 65536 + 5).fill_(hvd.rank() + 1)
    other = hvd.empty_shared(40).fill_(hvd.rank() + 1)

    def job(backend: Backend) -> Coroutine[None]:
        yield from backend.allreduce([tensor, torch.ones(70_000), other], SUM)

    run(job)
    total = sum(range(1, hvd.size() + 1))
    assert tensor.eq(total).all()
    assert other.eq(total).all()
    assert hvd.allreduce_(other, op=hvd.Average, name="other").eq(total).all()
