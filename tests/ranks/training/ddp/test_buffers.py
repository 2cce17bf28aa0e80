"""Buffers become those of the first rank at the start of each forward that follows a synchronised one."""

from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.errors import HorovodInternalError, MismatchError, UsageError
from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_overlap


class Counting(nn.Module):
    """Counts calls, by the number of the rank plus one; keeps buffers of many kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.step = rank + 1
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("large", torch.zeros(200, 300).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.step
        self.narrow.fill_(self.step)
        self.flags[self.step] = True
        # Replaced, not written.
        self.large = self.large + self.step
        return (x * self.weight).sum()


def values(module: Counting) -> list[float]:
    return [float(module.count), float(module.narrow[0]), float(module.flags.sum()), float(module.large[0, 0])]


def test_they_follow_the_first_rank(hvd: ModuleType) -> None:
    module = Counting(hvd.rank())
    ddp = DistributedDataParallel(module)
    own = hvd.rank() + 1
    for step in range(3):
        ddp(torch.ones(3)).backward()
        # The first rank has counted one in each forward; to its sums this rank has added its own once.
        assert values(module) == [step + own, own, float(1 + (step > 0 and own > 1)), step + own]
    assert module.large.stride() == torch.zeros(200, 300).t().stride()


def test_when_they_do(hvd: ModuleType) -> None:
    """In the training forward after one that was synchronised; not after one in no_sync(), nor ever in no_grad()."""
    module = Counting(hvd.rank())
    ddp = DistributedDataParallel(module)
    own = hvd.rank() + 1
    ddp(torch.ones(3)).backward()
    assert module.count == own
    with torch.no_grad():
        ddp(torch.ones(3))
    assert module.count == 2 * own
    ddp(torch.ones(3)).backward()
    assert module.count == 2 + own
    with ddp.no_sync():
        ddp(torch.ones(3)).backward()
        assert module.count == 3 + own
        ddp(torch.ones(3)).backward()
        assert module.count == 3 + 2 * own
    ddp(torch.ones(3)).backward()
    assert module.count == 3 + 3 * own
    ddp(torch.ones(3)).backward()
    assert module.count == 6 + own


@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_left_to_each_rank(hvd: ModuleType, option: str) -> None:
    """broadcast_buffers=False leaves them alone from the start; forward_sync_buffers=False begins with equal ones."""
    module = Counting(hvd.rank())
    module.count.fill_(10 * hvd.rank())
    ddp = DistributedDataParallel(module, **{option: False})
    for _ in range(2):
        ddp(torch.ones(3)).backward()
    start = 10 * hvd.rank() if option == "broadcast_buffers" else 0
    assert module.count == start + 2 * (hvd.rank() + 1)


def test_graphs_that_have_saved_them_stay_valid(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval())
    first = ddp(torch.ones(4, 3))
    second = ddp(torch.ones(4, 3))
    (first.sum() + second.sum()).backward()


def test_ignored_ones(hvd: ModuleType) -> None:
    module = Counting(hvd.rank())
    module._ddp_params_and_buffers_to_ignore = ["count"]
    ddp = DistributedDataParallel(module)
    for _ in range(3):
        ddp(torch.ones(3)).backward()
    assert module.count == 3 * (hvd.rank() + 1)
    assert module.large[0, 0] == 2 + hvd.rank() + 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_join", [False, True])
def test_an_evaluation_on_one_rank(hvd: ModuleType, context: type, in_join: bool) -> None:
    """In the middle of training, also in a Join context, also with a communication hook of the user."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name=f"b{bucket.index()}"))
    with ddp.join(enable=in_join):
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.randn(4, 3)).square().sum().backward()
            if hvd.rank() == step % hvd.size():
                with context():
                    ddp.eval()(torch.randn(4, 3))
                ddp.train()
    assert same_on_all_ranks([each.grad for each in module.parameters()])


@pytest.mark.mpi(min_size=2)
def test_different_ones_are_refused(hvd: ModuleType) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("extra", torch.zeros(2 + hvd.rank()))
    with pytest.raises(MismatchError, match=r"rank 1: 'buffer extra': expected shape \[2\] float32, got shape \[3\]"):
        DistributedDataParallel(module)


@pytest.mark.mpi(min_size=2)
def test_shapes_that_part_later_are_named(hvd: ModuleType) -> None:
    """On all ranks, and training goes on where they are alike again; so it does where all grow alike."""
    module = nn.Linear(2, 2)
    module.register_buffer("history", torch.zeros(2))
    ddp = DistributedDataParallel(module)
    for length in (2, 3, 3):
        module.history = torch.full((length,), float(hvd.rank()))
        ddp(torch.ones(1, 2)).sum().backward()
        assert torch.equal(module.history, torch.zeros(length))
    module.history = torch.zeros(3 + (hvd.rank() == 1))
    with pytest.raises(MismatchError, match=r"rank 1: .*'history': expected shape \[3\] float32, got shape \[4\]"):
        ddp(torch.ones(1, 2))
    module.history = torch.full((5,), float(hvd.rank()))
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.history, torch.zeros(5))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("init_sync", [True, False])
def test_expanded_ones_cannot_be_written(hvd: ModuleType, init_sync: bool) -> None:
    """They are refused on all ranks, and may be left to each rank."""
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(1).expand(4))

    def train() -> None:
        DistributedDataParallel(module, init_sync=init_sync)(torch.ones(1, 2)).sum().backward()

    with pytest.raises((UsageError, HorovodInternalError), match=r"'mask'.*share one place in memory"):
        train()
    ddp = DistributedDataParallel(module, init_sync=init_sync, broadcast_buffers=False)
    ddp(torch.ones(1, 2)).sum().backward()
