"""A wrapper that has raised ends with its last reference, as any other.

Else it would reduce what the program does with the model alone, until the garbage collector runs.
"""

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped
from torch.optim import SGD

from hvlike.errors import DataParallelError, UsageError
from hvlike.optim import ZeroRedundancyOptimizer

Loss = Callable[[torch.nn.Module], torch.Tensor]


def of_ddp(model: torch.nn.Module, loss: Loss) -> Any:
    """The forward after a backward that failed half way, whose gradients the program has dropped."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    ddp = Wrapped("ddp", model).module
    loss(ddp).backward()
    ddp.zero_grad()
    handle = model[1].register_full_backward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss(ddp).backward()
    handle.remove()
    ddp.zero_grad()
    with pytest.raises(DataParallelError, match="interrupted by an error"):
        loss(ddp)
    return ddp


def of_optimizer(model: torch.nn.Module, loss: Loss) -> Any:
    """A gradient of a frozen parameter that came after the others."""
    model[0].requires_grad_(False)
    optimizer = Wrapped("optimizer", model).optimizer
    for late in (False, True):
        optimizer.zero_grad()
        loss(model).backward()
        if late:
            model[0].bias.grad = torch.ones_like(model[0].bias)
            with pytest.raises(UsageError, match="had arrived"):
                optimizer.step()
        else:
            optimizer.step()
    return optimizer


def of_adasum(model: torch.nn.Module, loss: Loss) -> Any:
    """A layer that is thawed in the closure."""
    model[0].requires_grad_(False)
    optimizer = Wrapped("adasum", model).optimizer

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        model[0].requires_grad_(True)
        result = loss(model)
        result.backward()
        return result

    with pytest.raises(UsageError, match="had arrived"):
        optimizer.step(closure)
    return optimizer


class Failing(SGD):
    """A step that fails."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


def of_zero(model: torch.nn.Module, loss: Loss) -> Any:
    """The share of each rank could not be updated."""
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Failing, reduce_gradients=True, lr=0.1)
    loss(model).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    return optimizer


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("raised", [of_ddp, of_optimizer, of_adasum, of_zero])
def test_it_ends_with_its_last_reference(hvd: ModuleType, raised: Callable[[torch.nn.Module, Loss], Any]) -> None:
    model = make_model()
    # torch keeps the frames of whoever makes its first optimizer.
    SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:
        left = weakref.ref(raised(model, lambda each: loss_of(each, share(hvd, whole_batch()))))
        assert left() is None
    finally:
        gc.enable()
    assert same_on_all_ranks(model.parameters())
