"""Ranks with different numbers of inputs in a Join context of a DistributedDataParallel."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike import convert_sync_batchnorm
from hvlike.errors import JoinError
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel, allreduce_hook


@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_what_gradients_are_divided_by(hvd: ModuleType, divide_by_initial: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    module = nn.Linear(5, 5, bias=False)
    ddp = DistributedDataParallel(module)
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(3 if rank == 0 and size > 1 else 5):
            ddp.zero_grad()
            ddp(torch.ones(1, 5) * 50).sum().backward()
            expected = 50.0
            if divide_by_initial and step >= 3 and size > 1:
                expected = 50 * (size - 1) / size
            torch.testing.assert_close(module.weight.grad, torch.full((5, 5), expected))
    # Outside of it all ranks count again.
    ddp.zero_grad()
    ddp(torch.full((1, 5), float(rank))).sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((5, 5), (size - 1) / 2))


class BatchNormNet(nn.Module):
    """Layers with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Unused(nn.Module):
    """A large layer, so that there are several buckets, and one that some ranks use and others do not."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 400), nn.Linear(400, 400)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.uses else x


KINDS = ["unused by those with more", "unused by those with fewer", "allreduce", "hook"]


def wrap(hvd: ModuleType, kind: str, early: int) -> DistributedDataParallel:
    """A module of this kind; `early` ranks have few inputs."""
    torch.manual_seed(0)
    if kind.startswith("unused"):
        module = Unused(uses=(hvd.rank() < early) == kind.endswith("more"))
        return DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.5)
    ddp = DistributedDataParallel(nn.Linear(4, 40))
    ddp.register_comm_hook(
        None, allreduce_hook if kind == "allreduce" else lambda state, bucket: allreduce_hook(state, bucket)
    )
    return ddp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("few", "more", "early", "interval"), [(0, 2, 1, 1), (3, 2, 2, 2), (3, 3, 1, 2), (0, 3, 2, 1)])
def test_all_end_alike(hvd: ModuleType, kind: str, few: int, more: int, early: int, interval: int) -> None:
    """The first ranks have few inputs, a second one of those a little more; every so many passes make a step."""
    rank, early = hvd.rank(), min(early, hvd.size() - 1)
    count = few + (rank % 2) * (more // 2) if rank < early else few + more
    ddp = wrap(hvd, kind, early)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    steps = 0
    with ddp.join():
        for step in range(count):
            local = step % interval != interval - 1
            with ddp.no_sync() if local else contextlib.nullcontext():
                ddp(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            if not local:
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
    assert steps == count
    assert same_on_all_ranks(ddp.parameters())
    # It goes on after the context.
    ddp.zero_grad()
    ddp(torch.ones(4, 4)).sum().backward()
    assert same_on_all_ranks(each.grad for each in ddp.parameters() if each.grad is not None)


def train(ddp: DistributedDataParallel, inputs: int, steps: list[int], **options: bool) -> None:
    """Use so many inputs in a context; `steps` gets those that were used."""
    with ddp.join(**options):
        for step in range(inputs):
            ddp(torch.randn(4, 4)).sum().backward()
            steps.append(step)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few", [0, 3])
def test_all_throw_together(hvd: ModuleType, kind: str, few: int) -> None:
    rank = hvd.rank()
    ddp = wrap(hvd, kind, 1)
    text = f"^Rank {rank} exhausted all inputs.$"
    if rank:
        text = "^Detected at least one rank that exhausted inputs. Throwing across all ranks.$"
    with pytest.raises(RuntimeError, match=text):
        train(ddp, few + 2 * bool(rank), steps := [], throw_on_early_termination=True)
    assert len(steps) == few
    ddp(torch.ones(4, 4)).sum().backward()


class Talking(nn.Module):
    """Talks to the other ranks in forward."""

    def __init__(self, allreduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.allreduce = allreduce

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.allreduce(torch.ones(1)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["SyncBatchNorm", "talking"])
def test_modules_that_talk_stop_with_the_first(hvd: ModuleType, kind: str) -> None:
    if kind == "talking":
        module: nn.Module = Talking(hvd.allreduce)
    else:
        module = convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    ddp = DistributedDataParallel(module)
    text = "Detected at least one" if hvd.rank() == 0 else f"Rank {hvd.rank()} exhausted all inputs"
    with pytest.raises(RuntimeError, match=text):
        train(ddp, 10 if hvd.rank() == 0 else 5, steps := [], throw_on_early_termination=True)
    assert len(steps) == 5
    assert same_on_all_ranks(ddp.parameters())


class Raises(nn.Module):
    """Fails in the second call on one rank."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails = fails
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ValueError("Intentional error")
        return self.layer(x)


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_exception_comes_out_unchanged(hvd: ModuleType, everywhere: bool) -> None:
    ddp = DistributedDataParallel(Raises(everywhere or hvd.rank() == 0))
    with pytest.raises((ValueError, JoinError), match="Intentional error") as info:
        train(ddp, 3, [])
    if everywhere:
        # Who comes late hears of it before it is its turn to fail.
        kinds = {each.__name__ for each in hvd.allgather_object(info.type)}
        assert "ValueError" in kinds
    elif hvd.rank() == 0:
        assert str(info.value) == "Intentional error"
    else:
        assert "Rank 0 has left the Join context of DistributedDataParallel with ValueError" in str(info.value)
    # The next one works, as does training without.
    ddp.zero_grad()
    with ddp.join():
        for _ in range(1 + hvd.rank()):
            ddp(torch.ones(2, 4)).sum().backward()
    ddp(torch.ones(2, 4)).sum().backward()
    assert same_on_all_ranks(ddp.parameters())


@pytest.mark.parametrize("sync", [True, False])
def test_buffers_that_are_the_ranks_own(hvd: ModuleType, sync: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    module = nn.Linear(2, 2)
    module.register_buffer("own", torch.zeros(3))
    ddp = DistributedDataParallel(module, forward_sync_buffers=sync)
    module.own.fill_(rank)
    with ddp.join():
        for _ in range(1 + rank):
            ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.own, torch.full((3,), float(size - 1 if sync else rank)))


def test_buffers_come_from_the_highest_that_is_there(hvd: ModuleType) -> None:
    """The last rank ends first: then the one before it has them."""
    rank, size = hvd.rank(), hvd.size()
    module = nn.Linear(2, 2)
    module.register_buffer("mark", torch.zeros(()))
    ddp = DistributedDataParallel(module)
    with ddp.join():
        for _ in range(2 if rank == size - 1 and size > 1 else 4):
            module.mark.fill_(rank)
            there = size - 1 if _ < 2 or size == 1 else size - 2
            ddp(torch.ones(1, 2)).sum().backward()
            assert module.mark == there
    assert module.mark == (size - 2 if size > 1 else 0)


def test_horovods_join(hvd: ModuleType) -> None:
    """hvd.join() stands in for gradients and buffers too; buffers are then those of the highest rank that is there."""
    rank, size = hvd.rank(), hvd.size()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(module)
    for step in range(2 + rank):
        ddp.zero_grad()
        ddp(torch.full((2, 4), 1.0 + step)).sum().backward()
        active = size if step < 2 else size - 1 - (step - 2)
        torch.testing.assert_close(module[1].bias.grad, torch.full((4,), 2.0 * active / size))
    hvd.join()
    ddp.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    assert same_on_all_ranks(each.grad for each in module.parameters() if each.grad is not None)


@pytest.mark.mpi(min_size=2)
def test_another_model_that_one_rank_has_dropped(hvd: ModuleType) -> None:
    """It may still be there on the other ranks, until their garbage collector runs."""
    dropped, ddp = (DistributedDataParallel(BatchNormNet()) for _ in range(2))
    for each in (dropped, ddp):
        each(torch.randn(3, 4)).sum().backward()
    gc.disable()
    try:
        if hvd.rank() == 0:
            del each, dropped
        with ddp.join():
            for _ in range(hvd.rank()):
                ddp(torch.randn(3, 4)).sum().backward()
    finally:
        gc.enable()
    assert same_on_all_ranks(ddp.parameters())


def test_the_first_forward_of_a_copy(hvd: ModuleType) -> None:
    """A rank without inputs follows the queue of its buffers, which begins there."""
    ddp = copy.deepcopy(DistributedDataParallel(BatchNormNet()))
    with Join([ddp]):
        for _ in range(2 if hvd.rank() == 0 else 0):
            ddp(torch.randn(3, 4)).sum().backward()
    assert same_on_all_ranks([*ddp.parameters(), *ddp.buffers()])


@pytest.mark.mpi(min_size=2)
def test_a_context_keeps_nothing_of_the_program(hvd: ModuleType) -> None:
    """The others replace a plan of several buckets, and a rank without inputs gives its part in it up."""
    module = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 30), nn.Linear(30, 3))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0001)
    # Frozen, it is reduced once more: then the plan changes.
    module[0].requires_grad_(False)
    gc.disable()
    try:
        with Join([ddp]):
            for _ in range(4 if hvd.rank() == 0 else 0):
                ddp(torch.randn(3, 4)).sum().backward()
        left = weakref.ref(ddp)
        del ddp
        assert left() is None
    finally:
        gc.enable()
