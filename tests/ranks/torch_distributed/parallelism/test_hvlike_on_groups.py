"""hvlike's own classes on groups of torch.distributed: what torch's take as process_group."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import (
    adam,
    assert_equal,
    halves,
    model_of,
    same_on_all_ranks,
    sgd,
    train,
    trained_alone,
)
from torch import nn

import hvlike
from hvlike.errors import UsageError
from hvlike.integrations.distributed_checkpoint import load, save
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel, allreduce_hook
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.differs_by_ranks(2)]


@pytest.fixture
def half() -> Iterator[dist.ProcessGroup]:
    with halves() as group:
        yield group


def test_data_parallel_in_a_half_of_the_ranks(half: dist.ProcessGroup) -> None:
    seed = dist.get_rank() % 2
    model = DistributedDataParallel(model_of(seed), process_group=half)
    assert model.process_set.ranks == list(range(seed, dist.get_world_size(), 2))
    train(model, sgd(model.parameters()), half)
    assert_equal(model, trained_alone(lambda: model_of(seed)))
    assert same_on_all_ranks(model.parameters(), half)


def test_the_group_of_all_ranks_is_the_set_of_all_ranks() -> None:
    model = DistributedDataParallel(model_of(), process_group=dist.group.WORLD)
    assert model.process_group is hvlike.global_process_set
    train(model, sgd(model.parameters()))
    assert_equal(model, trained_alone())


def test_an_optimizer_that_averages(half: dist.ProcessGroup) -> None:
    model = model_of()
    train(model, hvlike.DistributedOptimizer(sgd(model.parameters()), process_set=half), half)
    assert_equal(model, trained_alone())


def test_state_that_is_shared_out(half: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(model_of(), process_group=half)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=half, lr=0.01, foreach=False
    )
    assert optimizer.world_size == dist.get_world_size(half)
    train(model, optimizer, half)
    assert_equal(model, trained_alone(optimizer=adam))


def test_ranks_without_inputs(half: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=half)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=half, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(3 + dist.get_rank(half)):
            optimizer.zero_grad()
            model(torch.ones(1)).sum().backward()
            optimizer.step()
    assert same_on_all_ranks(model.parameters(), half)


def test_a_group_of_another_backend_is_refused() -> None:
    model, other = model_of(), dist.ProcessGroup(0, 1)
    with pytest.raises(UsageError, match="backend 'hvlike'"):
        DistributedDataParallel(model, process_group=other)
    with pytest.raises(UsageError, match="backend 'hvlike'"):
        hvlike.DistributedOptimizer(sgd(model.parameters()), process_set=other)
    with pytest.raises(UsageError, match="backend 'hvlike'"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=other, lr=0.1)


def test_each_half_saves_and_loads_for_itself(half: dist.ProcessGroup) -> None:
    names = [tempfile.mkdtemp() if dist.get_rank(half) == 0 else None]
    dist.broadcast_object_list(names, group_src=0, group=half)
    folder = Path(names[0])
    seed = dist.get_rank() % 2
    model = DistributedDataParallel(model_of(seed), process_group=half)
    options = {"process_group": half, "lr": 0.01, "foreach": False}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    train(model, optimizer, half, steps=range(2))
    save(folder / "one", model, optimizer, process_group=half, half=seed)
    other = DistributedDataParallel(model_of(5), process_group=half)
    again = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, **options)
    assert load(folder / "one", other, again, process_group=half) == {"half": seed}
    train(other, again, half, steps=[2])
    assert_equal(other, trained_alone(lambda: model_of(seed), adam))
    dist.barrier(group=half)
    if dist.get_rank(half) == 0:
        shutil.rmtree(folder)


def test_batch_normalisation_under_torchs_data_parallel(half: dist.ProcessGroup) -> None:
    """Torch's own SyncBatchNorm is for GPUs only."""

    def make() -> nn.Module:
        model = model_of()
        return nn.Sequential(*model[:2], nn.BatchNorm1d(16).double(), *model[2:])

    model = nn.parallel.DistributedDataParallel(hvlike.convert_sync_batchnorm(make(), half), process_group=half)
    train(model, sgd(model.parameters()), half)
    assert_equal(model, trained_alone(make))
    assert same_on_all_ranks(model.buffers(), half)


def test_a_communication_hook_with_a_group_as_its_state(half: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(model_of(), process_group=half)
    model.register_comm_hook(half, allreduce_hook)
    train(model, sgd(model.parameters()), half)
    assert_equal(model, trained_alone())
