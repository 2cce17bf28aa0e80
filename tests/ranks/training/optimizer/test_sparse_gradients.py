"""Sparse gradients of embeddings: reduced as they are, or sent dense and made sparse again."""

from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import nn

from hvlike import DistributedOptimizer

# torch's own optimizers warn, too, where they make sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def indices_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, 20, (5,), generator=generator)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad])
def test_equal_to_one_process(hvd: ModuleType, as_dense: bool, optimizer_class: type[torch.optim.Optimizer]) -> None:
    model, expected = make(), make()
    optimizer = DistributedOptimizer(
        optimizer_class(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=as_dense
    )
    plain = optimizer_class(expected.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(indices_of(hvd.rank(), step)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        sum(expected(indices_of(rank, step)).square().mean() / hvd.size() for rank in range(hvd.size())).backward()
        plain.step()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("as_dense", [False, True])
def test_an_optimizer_that_takes_only_sparse_gradients(hvd: ModuleType, as_dense: bool) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.SparseAdam(model.parameters(), lr=0.1), sparse_as_dense=as_dense)
    for step in range(4):
        optimizer.zero_grad()
        # Once every rank has seen a gradient, a rank may also have none.
        if step < 2 or hvd.rank() % 2 == step % 2:
            model(indices_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
        assert model.weight.grad is None or model.weight.grad.is_sparse
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("as_dense", [False, True])
def test_a_rank_that_never_used_the_embedding(hvd: ModuleType, as_dense: bool) -> None:
    model = make()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=as_dense)
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == hvd.size() - 1:
            model(indices_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_accumulate(hvd: ModuleType, as_dense: bool) -> None:
    model = make()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=as_dense, backward_passes_per_step=2
    )
    for step in range(4):
        if step % 2 == 0:
            optimizer.zero_grad()
        model(indices_of(hvd.rank(), step)).square().sum().backward()
        if step % 2:
            optimizer.step()
    assert same_on_all_ranks(model.parameters())
