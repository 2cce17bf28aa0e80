"""`parameter.data` of another shape: torch refuses it in backward, alike on all ranks, and others go on."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import SGD


def test_it_is_refused_and_a_new_parameter_trains(hvd: ModuleType) -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.weight.data = torch.ones(1, 3)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(1, 3)).sum().backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after") == hvd.size()
    model.weight = nn.Parameter(torch.ones(1, 3))
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), 1 - 0.1 * (hvd.size() + 1) / 2))
