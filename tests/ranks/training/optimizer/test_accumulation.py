"""Gradients of several backward passes are summed up on each rank and reduced once."""

from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor, nn

from hvlike import DistributedOptimizer
from hvlike.training.gradients.grad_state import Phase

pytestmark = pytest.mark.differs_by_overlap


def make(passes: int = 1) -> tuple[nn.Module, DistributedOptimizer]:
    model = make_model()
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=passes)


def expected_after(*batches: int) -> list[Tensor]:
    """One process, one step on the sum of the gradients of these batches."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss_of(model, whole_batch(batch)).backward()
    optimizer.step()
    return list(model.parameters())


def backward(hvd: ModuleType, model: nn.Module, batch: int) -> None:
    loss_of(model, share(hvd, whole_batch(batch))).backward()


def check(model: nn.Module, *batches: int) -> None:
    assert largest_difference(model.parameters(), expected_after(*batches)) < 1e-6
    assert same_on_all_ranks(model.parameters())


def test_passes_are_summed(hvd: ModuleType) -> None:
    model, optimizer = make(passes=3)
    for batch in range(3):
        assert optimizer.gradients.phase is (Phase.ACCUMULATING if batch else Phase.IDLE)
        backward(hvd, model, batch)
    assert optimizer.gradients.phase is Phase.REDUCING
    optimizer.step()
    assert optimizer.gradients.phase is Phase.IDLE
    check(model, 0, 1, 2)


@pytest.mark.parametrize("passes_on_other_ranks", [1, 2])
def test_fewer_passes_than_declared_are_reduced_by_step(hvd: ModuleType, passes_on_other_ranks: int) -> None:
    model, optimizer = make(passes=2)
    backward(hvd, model, 0)
    if hvd.rank() and passes_on_other_ranks == 2:
        backward(hvd, model, 1)
    optimizer.step()
    if passes_on_other_ranks == 1:
        check(model, 0)
    assert same_on_all_ranks(model.parameters())


def test_no_sync_keeps_sums_local(hvd: ModuleType) -> None:
    model, optimizer = make()
    with optimizer.no_sync():
        backward(hvd, model, 0)
        backward(hvd, model, 1)
        assert hvd.size() == 1 or not same_on_all_ranks(parameter.grad for parameter in model.parameters())
    backward(hvd, model, 2)
    optimizer.step()
    check(model, 0, 1, 2)


def test_no_sync_and_then_only_step(hvd: ModuleType) -> None:
    model, optimizer = make()
    with optimizer.no_sync():
        backward(hvd, model, 0)
    optimizer.step()
    check(model, 0)


def test_no_sync_passes_do_not_count(hvd: ModuleType) -> None:
    model, optimizer = make(passes=2)
    with optimizer.no_sync():
        backward(hvd, model, 0)
    backward(hvd, model, 1)
    assert optimizer.gradients.phase is Phase.ACCUMULATING
    backward(hvd, model, 2)
    optimizer.step()
    check(model, 0, 1, 2)


def test_the_number_of_passes_can_change_between_steps(hvd: ModuleType) -> None:
    model, optimizer = make(passes=3)
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    backward(hvd, model, 0)
    backward(hvd, model, 1)
    assert optimizer.gradients.phase is Phase.REDUCING
    optimizer.step()
    check(model, 0, 1)


def test_zero_grad_drops_local_sums(hvd: ModuleType) -> None:
    model, optimizer = make(passes=2)
    backward(hvd, model, 5)
    optimizer.zero_grad()
    backward(hvd, model, 0)
    assert optimizer.gradients.phase is Phase.ACCUMULATING
    backward(hvd, model, 1)
    optimizer.step()
    check(model, 0, 1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_sets_to_none_or_to_zero(hvd: ModuleType, set_to_none: bool) -> None:
    model, optimizer = make()
    backward(hvd, model, 0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert (parameter.grad is None) if set_to_none else not parameter.grad.any()
    backward(hvd, model, 1)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_two_losses_with_parameters_of_their_own(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = DistributedOptimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        backward(hvd, first, 0)
        backward(hvd, second, 1)
        optimizer.step()
    assert same_on_all_ranks([*first.parameters(), *second.parameters()])


@pytest.mark.parametrize("wrapped", ["module", "optimizer"])
def test_gradients_that_are_parts_of_one_tensor_are_summed(hvd: ModuleType, wrapped: str) -> None:
    # Once refused as "changed in place": autograd keeps parts of the gradient of torch.cat, and their changes count as
    # those of all of them.
    parameters = nn.ParameterList([torch.ones(2), torch.ones(3), torch.ones(1)])
    if wrapped == "module":
        model = hvd.nn.DistributedDataParallel(Concatenated(parameters))
        with model.no_sync():
            model(hvd.rank()).backward()
        model(hvd.rank()).backward()
    else:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), backward_passes_per_step=2)
        for _ in range(2):
            Concatenated(parameters)(hvd.rank()).backward()
        optimizer.synchronize()
    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.full_like(parameter, hvd.size() - 1.0))


class Concatenated(nn.Module):
    """Uses its parameters as one."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.parts = parameters

    def forward(self, factor: float) -> Tensor:
        return (torch.cat(list(self.parts)) * torch.full((6,), float(factor))).sum()
