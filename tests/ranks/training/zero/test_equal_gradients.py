"""A ZeroRedundancyOptimizer that finds other gradients on each rank says so, once."""

import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.zero_problem import average_gradients
from torch import nn
from torch.optim import SGD

from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer


def warnings_of(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, *, averages: bool, joins: bool = False, **options: Any
) -> int:
    """How often two steps with gradients of each rank's own are warned of on this rank."""
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hvlike"), Join([optimizer], enable=joins):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
            if averages:
                average_gradients(hvd, model)
            optimizer.step()
    return sum("the gradients differ" in record.getMessage() for record in caplog.records)


def test_the_first_rank_warns_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(hvd, caplog, averages=False) == (hvd.rank() == 0 and hvd.size() > 1)


def test_gradients_that_are_averaged_are_well(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(hvd, caplog, averages=True) == 0
    assert warnings_of(hvd, caplog, averages=False, reduce_gradients=True) == 0


def test_in_a_join_context_nobody_is_asked(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(hvd, caplog, averages=False, joins=True) == 0


def test_a_rank_that_has_joined_is_not_asked(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        if hvd.rank() < max(1, hvd.size() - 1):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.join()
    assert not [record for record in caplog.records if "the gradients differ" in record.getMessage()]
