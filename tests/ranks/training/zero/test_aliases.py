"""Parameters that share memory get all their updates, as with the plain optimizer."""

from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn
from torch.optim import SGD

from hvlike.errors import UsageError
from hvlike.optim import ZeroRedundancyOptimizer


def made() -> list[nn.Parameter]:
    base = torch.ones(12)
    return [nn.Parameter(base[:8]), nn.Parameter(torch.ones(9)), nn.Parameter(base[4:])]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], factor: float) -> None:
    optimizer.zero_grad()
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, factor * (number + 1))
    optimizer.step()


def values(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [each.detach() for each in parameters]


@pytest.mark.parametrize("reduces", [True, False])
def test_as_the_plain_optimizer(hvd: ModuleType, reduces: bool) -> None:
    ours, plain = made(), made()
    optimizer = ZeroRedundancyOptimizer(ours, SGD, lr=0.1, momentum=0.9, reduce_gradients=reduces)
    reference = SGD(plain, lr=0.1, momentum=0.9)
    for number in range(3):
        step(optimizer, ours, number + 1)
        step(reference, plain, number + 1)
    for mine, its in zip(values(ours), values(plain), strict=True):
        torch.testing.assert_close(mine, its)
    assert same_on_all_ranks(values(ours))


@pytest.mark.mpi(min_size=2)
def test_in_a_group_added_later(hvd: ModuleType) -> None:
    ours, plain = made(), made()
    optimizer = ZeroRedundancyOptimizer(ours[:2], SGD, lr=0.1, reduce_gradients=True)
    optimizer.add_param_group({"params": ours[2:]})
    reference = SGD(plain, lr=0.1)
    step(optimizer, ours, 1)
    step(reference, plain, 1)
    for mine, its in zip(values(ours), values(plain), strict=True):
        torch.testing.assert_close(mine, its)


def test_views_of_a_bucket_would_take_them_apart(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="parameters number 0 and 2 share memory"):
        ZeroRedundancyOptimizer(made(), SGD, lr=0.1, parameters_as_bucket_view=True)


@pytest.mark.mpi(min_size=2)
def test_adasum_would_count_changes_twice(hvd: ModuleType) -> None:
    parameters = made()
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), op=hvd.Adasum)
    with pytest.raises(UsageError, match=r"'noname\.0\.0' and 'noname\.0\.2' share memory"):
        step(optimizer, parameters, 1)


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_a_parameter_gets_memory_of_another_shape(hvd: ModuleType, reduces: bool, view: bool) -> None:
    """Alike on all ranks, between two steps."""
    parameter, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer(
        [parameter, other], SGD, lr=0.1, reduce_gradients=reduces, parameters_as_bucket_view=view
    )
    for length in (4, 6, 2, 2):
        if length != len(parameter):
            parameter.data = torch.ones(length)
        before = float(parameter.detach()[0])
        optimizer.zero_grad()
        for each in (parameter, other):
            each.grad = torch.ones_like(each)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((length,), before - 0.1))
    assert same_on_all_ranks([parameter.detach(), other.detach()])
