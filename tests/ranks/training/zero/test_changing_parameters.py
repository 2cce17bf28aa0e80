"""Parameters that are frozen, thawed or converted between two steps: those of one process, the same on all ranks."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

Change = Callable[[int, Any], None]


def convert(step: int, model: Any) -> None:
    if step == 2:
        model.double()


def convert_a_layer(step: int, model: Any) -> None:
    if step == 2:
        model[2].double()


def freeze(step: int, model: Any) -> None:
    model[0].requires_grad_(step != 1)
    model[4].requires_grad_(step < 2)


def thaw(step: int, model: Any) -> None:
    model[4].requires_grad_(step > 1)


@pytest.mark.parametrize("as_bucket_view", [False, True])
@pytest.mark.parametrize("reduce_gradients", [False, True])
@pytest.mark.parametrize("change", [convert, convert_a_layer, freeze, thaw])
def test_between_two_steps(hvd: ModuleType, change: Change, reduce_gradients: bool, as_bucket_view: bool) -> None:
    results = []
    for distributed in (False, True):
        model = make_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(lambda layer, given: given[0].to(layer.weight.dtype))
        change(0, model)
        wrapped: nn.Module = model
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
        if distributed:
            wrapped = model if reduce_gradients else DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.SGD,
                parameters_as_bucket_view=as_bucket_view,
                reduce_gradients=reduce_gradients,
                lr=0.1,
                weight_decay=0.1,
                foreach=False,
            )
        for step in range(4):
            optimizer.zero_grad()
            change(step, model)
            inputs, targets = share(hvd, whole_batch(step)) if distributed else whole_batch(step)
            (wrapped(inputs).float() - targets).square().mean().backward()
            optimizer.step()
            if distributed:
                assert same_on_all_ranks(model.parameters())
        results.append([each.double() for each in model.parameters()])
    assert largest_difference(*results) < 1e-6
