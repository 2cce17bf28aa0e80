"""`parameter.data` of another shape: torch refuses it in backward, alike on all ranks, and others go on."""

from types import ModuleType

import pytest
import torch
from support.pretended_nodes import nodes_of
from torch import nn
from torch.optim import SGD


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("ranks_per_node", [1, None])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_it_is_refused_whatever_came_before(
    hvd: ModuleType, layer: int, ranks_per_node: int | None, steps: int
) -> None:
    with nodes_of(hvd, ranks_per_node):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        model[layer].weight.grad = None
        model[layer].weight.data = torch.ones(2, 3)
        rows = torch.ones(1, 3 if layer == 0 else 2)
        optimizer.zero_grad()
        if layer == 1:
            model.insert(1, nn.ConstantPad1d((0, 1), 1.0))
        with pytest.raises(RuntimeError, match="shape"):
            model(rows).sum().backward()


def test_a_new_parameter_trains_after_it(hvd: ModuleType) -> None:
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
