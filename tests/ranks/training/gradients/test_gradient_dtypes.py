"""Gradients travel in their own dtype and form, whatever those of their parameters are."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.ways import Wrapped
from torch import Tensor, nn
from torch.optim import SGD

from hvlike.errors import MismatchError
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.differs_by_overlap

has_grad_dtype = pytest.mark.skipif(not hasattr(torch.zeros(1), "grad_dtype"), reason="torch before 2.10")

STEP = 2.0**-7
"""Between 1 and the next bfloat16: a mean of both is none."""


class Model(nn.Module):
    """Parameters of bfloat16 with gradients of float32, and one of float32."""

    def __init__(self, dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
        for each in self.parameters():
            each.grad_dtype = dtype

    def forward(self, factor: float, used: bool = True) -> Tensor:
        loss = (self.first.float() * factor).sum()
        return loss + (self.second.float() * factor).sum() if used else loss


def wrap(way: str, model: nn.Module, **options: Any) -> Wrapped:
    return Wrapped(way, model, lr=0.5, foreach=False, **options)


WAYS = ["optimizer", "find unused", "hook", "zero"]


def gradient_of(rank: int) -> float:
    return 1 + STEP * bool(rank)


def mean(hvd: ModuleType) -> float:
    return sum(map(gradient_of, range(hvd.size()))) / hvd.size()


@has_grad_dtype
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_not_rounded(hvd: ModuleType, way: str) -> None:
    model = Model()
    wrapped = wrap(way, model)
    optimizer = wrapped.optimizer
    for _ in range(2):
        optimizer.zero_grad()
        wrapped.module(gradient_of(hvd.rank())).backward()
        optimizer.step()
        for parameter in filter(wrapped.owns, model.parameters()):
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.float32
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter.grad, mean(hvd)), rtol=1e-6, atol=0)
    assert same_on_all_ranks(model.parameters())


@has_grad_dtype
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_a_gradient(hvd: ModuleType, way: str) -> None:
    model = Model()
    wrapped = wrap(way, model)
    optimizer = wrapped.optimizer
    for step in range(4):
        optimizer.zero_grad()
        wrapped.module(1 + STEP, used=step == 1 or hvd.rank() == 0).backward()
        optimizer.step()
        if step != 1 and wrapped.owns(model.second):
            assert model.second.grad is not None
            torch.testing.assert_close(
                model.second.grad, torch.full((2, 3), (1 + STEP) / hvd.size()), rtol=1e-6, atol=0
            )
    assert same_on_all_ranks(model.parameters())


@has_grad_dtype
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_have_joined(hvd: ModuleType, way: str) -> None:
    model = Model()
    wrapped = wrap(way, model)
    optimizer = wrapped.optimizer
    with Join(wrapped.joinables):
        for _ in range(1 + hvd.rank()):
            optimizer.zero_grad()
            wrapped.module(1.0).backward()
            optimizer.step()
    assert same_on_all_ranks(model.parameters())
    steps = [sum(rank >= step for rank in range(hvd.size())) / hvd.size() for step in range(hvd.size())]
    torch.testing.assert_close(model.first.float(), torch.full((4,), 1 - 0.5 * sum(steps)), rtol=2e-2, atol=1e-2)


@has_grad_dtype
def test_a_share_of_absent_ranks(hvd: ModuleType) -> None:
    """Others reduce: a rank that is out of data gets the gradients of its share, unrounded."""
    model = Model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.5, foreach=False)
    seen: list[torch.dtype] = []
    step = optimizer.optim.step

    def noting(*arguments: Any, **keywords: Any) -> Any:
        groups = optimizer.optim.param_groups
        seen.extend(each.grad.dtype for group in groups for each in group["params"] if each.grad is not None)
        return step(*arguments, **keywords)

    optimizer.optim.step = noting  # type: ignore[method-assign]
    with Join([optimizer]):
        for _ in range(1 + hvd.rank()):
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
    assert set(seen) <= {torch.float32}
    assert same_on_all_ranks(model.parameters())


@has_grad_dtype
def test_the_dtype_changes_between_steps(hvd: ModuleType) -> None:
    """Beside backward the ranks have begun to reduce what has the dtype before: an error says what to do."""
    begins_early, before = os.environ.get("HVLIKE_OVERLAP") == "1", torch.bfloat16
    model = Model(before)
    optimizer = wrap("optimizer", model).optimizer
    for dtype in (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16):
        optimizer.zero_grad()
        for each in model.parameters():
            each.grad_dtype = dtype
        model(gradient_of(hvd.rank())).backward()
        if begins_early and dtype is not before:
            with pytest.raises(MismatchError, match="Change grad_dtype of a parameter before the optimizer"):
                optimizer.step()
            return
        optimizer.step()
        assert model.first.grad is not None
        assert model.first.grad.dtype is dtype
        if dtype is torch.float32:
            torch.testing.assert_close(model.first.grad, torch.full((4,), mean(hvd)), rtol=1e-6, atol=0)
    assert same_on_all_ranks(model.parameters())


@has_grad_dtype
def test_any_dtype(hvd: ModuleType) -> None:
    model = Model(None)
    optimizer = wrap("optimizer", model).optimizer
    for each in model.parameters():
        each.grad = torch.full(each.shape, gradient_of(hvd.rank()))
    optimizer.synchronize()
    torch.testing.assert_close(model.first.grad, torch.full((4,), mean(hvd)), rtol=1e-6, atol=0)


@has_grad_dtype
def test_adasum_reduces_changes_of_the_parameters(hvd: ModuleType) -> None:
    model = Model()
    optimizer = wrap("adasum", model).optimizer
    model(1.0, used=hvd.rank() == 0).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("way", ["optimizer", "zero"])
@pytest.mark.parametrize("form", ["channels_last", "conjugate", "negative", "transposed"])
def test_other_forms(hvd: ModuleType, way: str, form: str) -> None:
    """A gradient set by hand that lies otherwise in memory than its parameter, on some ranks."""
    value = torch.arange(24.0).view(2, 3, 2, 2)
    value = torch.complex(value, value + 1) if form == "conjugate" else value
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(value))
    model.other = nn.Parameter(torch.zeros_like(value))
    wrapped = wrap(way, model)
    optimizer = wrapped.optimizer
    forms: dict[str, Callable[[], Tensor]] = {
        "channels_last": lambda: value.clone(memory_format=torch.channels_last),
        "conjugate": lambda: value.clone().conj(),
        "negative": lambda: torch._neg_view(value.clone()),
        "transposed": lambda: value.clone().transpose(0, 1).contiguous().transpose(0, 1),
    }
    made = forms[form]
    gradient = made()
    for _ in range(3):
        expected = gradient.resolve_conj().resolve_neg().contiguous()
        model.weight.grad = made() if hvd.rank() == 0 else expected.clone()
        optimizer.step()
        if wrapped.owns(model.weight):
            torch.testing.assert_close(model.weight.grad.resolve_conj().resolve_neg(), expected)
        assert model.other.grad is None
        optimizer.zero_grad()
    assert same_on_all_ranks(torch.view_as_real(each) if each.is_complex() else each for each in model.parameters())
