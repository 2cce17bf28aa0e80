"""torch's DistributedDataParallel trains as one process does on the whole batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import (
    STEPS,
    assert_equal,
    batch_of,
    halves,
    model_of,
    same_on_all_ranks,
    sgd,
    share,
    train,
    trained_alone,
)
from support.training.problem import loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.differs_by_ranks(2)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    {"init_sync": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "default")
def test_as_one_process(options: dict[str, Any]) -> None:
    model = DistributedDataParallel(model_of(), **options)
    train(model, sgd(model.parameters()))
    assert_equal(model, trained_alone())
    assert same_on_all_ranks(model.parameters())


def test_parameters_and_buffers_begin_as_those_of_rank_0() -> None:
    model = nn.Sequential(model_of(dist.get_rank()), nn.BatchNorm1d(3).double())
    model[1].running_mean.fill_(dist.get_rank() + 1)
    wrapped = DistributedDataParallel(model)
    assert_equal(model[0], model_of(0))
    assert torch.equal(wrapped.module[1].running_mean, torch.ones(3).double())


def test_buffers_are_rank_0s_in_each_forward() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double())
    for step in range(2):
        loss_of(model, share(batch_of(step))).backward()
        model(batch_of(step)[0])
    assert same_on_all_ranks([model.module[1].running_mean])


def test_no_sync_adds_up() -> None:
    model = DistributedDataParallel(model_of())
    parts = [tuple(each.chunk(3)[part] for each in share(batch_of(0))) for part in range(3)]
    with model.no_sync():
        for part in parts[:2]:
            (loss_of(model, part) / 3).backward()
    (loss_of(model, parts[2]) / 3).backward()
    alone = model_of()
    loss_of(alone, batch_of(0)).backward()
    assert_equal([each.grad for each in model.parameters()], [each.grad for each in alone.parameters()])


class Branches(nn.Module):
    """Each rank goes its own way, and one way is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: Tensor, way: int) -> Tensor:
        return self.ways[way](inputs)


@pytest.mark.mpi(min_size=2)
def test_unused_parameters_count_as_zeros_and_what_nobody_uses_has_no_gradient() -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    model(torch.ones(1, 6), rank % 2).sum().backward()
    for way in range(2):
        users = len(range(way, size, 2))
        assert torch.allclose(model.module.ways[way].bias.grad, torch.full((3,), users / size))
    assert model.module.ways[2].bias.grad is None


@pytest.mark.mpi(min_size=2)
def test_each_half_of_the_ranks_trains_for_itself() -> None:
    with halves() as group:
        model = DistributedDataParallel(model_of(dist.get_rank() % 2), process_group=group)
        train(model, sgd(model.parameters()), group)
        assert_equal(model, trained_alone(lambda: model_of(dist.get_rank() % 2)))


def test_ranks_without_inputs_shadow_the_others() -> None:
    """Rank r has r batches more than rank 0; gradients are divided by the ranks that still have inputs."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    begin = model.module.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=False):
        for _ in range(STEPS + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(1, 1).double()).sum().backward()
            optimizer.step()
    steps = STEPS + dist.get_world_size() - 1
    assert_equal(model, [torch.tensor([[begin - steps]]).double()])
    assert same_on_all_ranks(model.parameters())
