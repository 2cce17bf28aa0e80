"""step(closure): gradients are reduced after each evaluation, and the loss is that of all ranks."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor

from hvlike import DistributedOptimizer, allgather_object, clip_grad_norm_

pytestmark = pytest.mark.differs_by_overlap


def make(cls: Any, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = make_model().double()
    return model, cls(model.parameters(), **options)


def closure_of(optimizer: Any, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, (batch[0].double(), batch[1].double()))
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_makes_the_same_evaluations_as_one_process(hvd: ModuleType, line_search: str | None) -> None:
    options = {"lr": 0.5, "max_iter": 6, "line_search_fn": line_search}
    expected, plain = make(torch.optim.LBFGS, **options)
    model, wrapped = make(torch.optim.LBFGS, **options)
    optimizer = DistributedOptimizer(wrapped)
    for step in range(3):
        expected_loss = plain.step(closure_of(plain, expected, whole_batch(step)))
        loss = optimizer.step(closure_of(optimizer, model, share(hvd, whole_batch(step))))
        assert abs(float(loss.detach()) - float(expected_loss.detach())) < 1e-9
    counts = [next(iter(each.state.values()))["func_evals"] for each in (optimizer, plain)]
    assert counts[0] == counts[1]
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-7
    assert same_on_all_ranks(model.parameters())


def test_the_loss_is_reduced_and_keeps_its_type(hvd: ModuleType) -> None:
    _, wrapped = make(torch.optim.SGD, lr=0.1)
    optimizer = DistributedOptimizer(wrapped)
    mean = sum(range(hvd.size())) / hvd.size()
    assert optimizer.step(lambda: float(hvd.rank())) == mean
    loss = optimizer.step(lambda: torch.tensor(float(hvd.rank())))
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(mean)
    assert optimizer.step(lambda: None) is None
    assert allgather_object(optimizer.step(lambda: (hvd.rank(), "text"))) == [
        (rank, "text") for rank in range(hvd.size())
    ]


def test_a_closure_that_clips_is_reduced_once(hvd: ModuleType) -> None:
    model, wrapped = make(torch.optim.SGD, lr=0.1)
    optimizer = DistributedOptimizer(wrapped, op=hvd.Sum)
    evaluate = closure_of(optimizer, model, share(hvd, whole_batch()))
    norms = []

    def closure() -> Tensor:
        loss = evaluate()
        norms.append(float(clip_grad_norm_(optimizer, 0.01)))
        return loss

    optimizer.step(closure)
    total = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm()
    assert float(total) == pytest.approx(0.01, rel=1e-3)
    assert norms[0] > 0.01


def test_a_closure_that_only_returns_the_loss(hvd: ModuleType) -> None:
    model, wrapped = make(torch.optim.SGD, lr=0.1)
    optimizer = DistributedOptimizer(wrapped)
    loss = closure_of(optimizer, model, share(hvd, whole_batch()))()
    optimizer.step(lambda: loss)
    assert same_on_all_ranks(model.parameters())
