"""Ranks are counted after other work: all hear the same number, whoever comes first and whatever lies between."""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.transport.loop.coroutine import Coroutine, Wait

SUM = Arithmetic(torch.float32, ReduceOp.SUM)


@pytest.mark.parametrize("work", [0, 5], ids=["alone", "beside a reduction"])
def test_all_ranks_hear_how_many_are_active(hvd: ModuleType, ranks_per_node: int | None, work: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    heard = []

    def job(backend: Backend) -> Coroutine[None]:
        for census in range(6):
            for _ in range((rank + census) % 3):
                yield Wait.AGAIN
            if work:
                tensor = torch.ones(work)
                yield from backend.allreduce([tensor], SUM)
                assert torch.equal(tensor, torch.full((work,), float(size)))
            heard.append((yield from backend.count_active(rank >= census)))

    run(job)
    assert heard == [max(size - census, 0) for census in range(6)]
