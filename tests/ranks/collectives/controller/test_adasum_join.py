"""op=Adasum while some ranks have joined: they are neutral, in allreduce and in the steps of an optimizer."""

from types import ModuleType

import pytest
import torch
from support.adasum_reference import adasum
from torch import nn

from hvlike.training.distributed_optimizer import DistributedOptimizer

pytestmark = pytest.mark.mpi(min_size=2)


def test_the_active_ranks_get_the_adasum_of_their_own(hvd: ModuleType) -> None:
    active = range(hvd.size() - 1)
    vectors = [torch.arange(6.0, dtype=torch.float64) - 2 * rank for rank in range(hvd.size())]
    if hvd.rank() in active:
        result = hvd.allreduce(vectors[hvd.rank()], name="uneven", op=hvd.Adasum)
        torch.testing.assert_close(result, adasum(vectors[:-1]))
    last = hvd.join()
    assert last == hvd.broadcast(torch.tensor(last), root_rank=0).item()


def test_an_optimizer_goes_on_without_the_rank_that_has_joined(hvd: ModuleType) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)

    def step() -> None:
        parameter.grad = torch.arange(4.0, dtype=torch.float64) - hvd.rank()
        optimizer.step()

    step()
    deltas = [rank - torch.arange(4.0, dtype=torch.float64) for rank in range(hvd.size())]
    expected = 1.0 + adasum(deltas)
    torch.testing.assert_close(parameter.detach(), expected)
    if hvd.rank() < hvd.size() - 1:
        step()
        torch.testing.assert_close(parameter.detach(), expected + adasum(deltas[:-1]))
    hvd.join()
