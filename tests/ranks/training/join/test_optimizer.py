"""DistributedOptimizer in a Join context: uneven inputs train as one process would, and all ranks end equal."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Doubles
from support.training.counters import AFTER, Counter
from support.training.parity import same_optimizers
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.join import Join

pytestmark = pytest.mark.differs_by_overlap


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss: Tensor = model(data).pow(2).mean()
    return loss


def reference(counts: Sequence[int], *, effective: bool, clip: float | None = None) -> nn.Module:
    """One process: in each step the gradients of the ranks that still have inputs, over all or over those."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        optimizer.zero_grad()
        for rank in active:
            (loss_of(model, rank, step) / (len(active) if effective else len(counts))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def wrap(hvd: ModuleType, model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def assert_equal_to(model: nn.Module, expected: nn.Module) -> None:
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-4, atol=1e-6)


COUNTS = [[2, 0, 3, 1], [0, 4, 1, 4]]


@pytest.mark.parametrize("effective", [False, True])
def test_clipping_between_synchronize_and_step(hvd: ModuleType, effective: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    counts = COUNTS[0][:size]
    model = model_of()
    optimizer = wrap(hvd, model)
    with Join([optimizer], divide_by_initial_world_size=not effective):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert_equal_to(model, reference(counts, effective=effective, clip=0.05))
    assert same_on_all_ranks(model.state_dict().values())
    assert same_optimizers(hvd, optimizer)


def test_epochs_with_a_scheduler_and_a_metric_that_is_averaged(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.5)
    steps = 0
    for epoch in range(3):
        counts = [(each + epoch) % size for each in range(size)]
        steps += max(counts)
        with Join([optimizer]):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                scheduler.step()
                active = sum(step < count for count in counts)
                # Unnamed, and not awaited by the ranks that have left the body: they count as zeros.
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == active
        assert same_on_all_ranks(model.state_dict().values())
        assert same_optimizers(hvd, optimizer)
        assert inner.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**steps)


def test_statistics_of_batch_norm_come_from_the_authority(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 1))
    optimizer = wrap(hvd, model)
    with Join([optimizer]) as join:
        train(model, optimizer, rank, 2 * (size - rank))
    assert join.authority == 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=join.authority)
    assert same_on_all_ranks(model.state_dict().values())
    assert same_optimizers(hvd, optimizer)
    with Join([optimizer], enable=False) as join:
        pass
    assert join.authority == size - 1


def test_two_optimizers_with_different_numbers_of_steps(hvd: ModuleType) -> None:
    rank = hvd.rank()
    models = [model_of(0), model_of(1)]
    optimizers = [wrap(hvd, model) for model in models]
    with Join(optimizers):
        for step in range(rank + 1):
            for model, optimizer, times in zip(models, optimizers, (2, 1), strict=True):
                for _ in range(times):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert same_on_all_ranks(model.state_dict().values())
        assert same_optimizers(hvd, optimizer)


def test_beside_a_joinable_of_ones_own(hvd: ModuleType) -> None:
    """Then the heartbeat goes on, and what the other one does is shadowed by its hook alone."""
    rank, size = hvd.rank(), hvd.size()
    counts = COUNTS[1][:size]
    for own_first in (True, False):
        model = model_of()
        optimizer = wrap(hvd, model)
        counter = Counter()
        with Join([counter, optimizer] if own_first else [optimizer, counter]):
            for step in range(counts[rank]):
                total = counter() if own_first else 0
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                total = total or counter()
                assert total == sum(step < count for count in counts)
        assert counter.tensor.item() == AFTER
        assert_equal_to(model, reference(counts, effective=False))
        assert same_on_all_ranks(model.state_dict().values())
        assert same_optimizers(hvd, optimizer)


@pytest.mark.mpi(min_size=2)
def test_throw_on_early_termination(hvd: ModuleType) -> None:
    rank = hvd.rank()
    model = model_of()
    optimizer = wrap(hvd, model)
    steps = 0

    def train() -> None:
        nonlocal steps
        with Join([optimizer], throw_on_early_termination=True):
            for step in range(2 + rank):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                steps += 1

    for epoch in range(1, 3):
        text = "Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one rank that exhausted inputs"
        with pytest.raises(RuntimeError, match=text):
            train()
        assert steps == 2 * epoch
        assert same_on_all_ranks(model.state_dict().values())
        assert same_optimizers(hvd, optimizer)


def test_adasum(hvd: ModuleType) -> None:
    """What steps have changed is reduced; each rank's momentum is its own."""
    rank = hvd.rank()
    model = model_of()
    optimizer = wrap(hvd, model, op=hvd.Adasum)
    for _ in range(2):
        with Join([optimizer]):
            train(model, optimizer, rank, rank)
        assert same_on_all_ranks(model.parameters())


def test_a_compressor_of_the_program_and_no_input_at_all(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of()
    optimizer = wrap(hvd, model, compression=Doubles())
    for epoch in range(3):
        with Join([optimizer]):
            train(model, optimizer, rank, 2 * ((rank + epoch) % size))
        assert same_on_all_ranks(model.state_dict().values())
        assert same_optimizers(hvd, optimizer)


def test_a_grad_scaler(hvd: ModuleType) -> None:
    rank = hvd.rank()
    model = model_of()
    optimizer = wrap(hvd, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Join([optimizer]):
        for step in range(rank + 1):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * (torch.inf if step == 0 and rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same_on_all_ranks(model.state_dict().values())
    assert same_optimizers(hvd, optimizer)


def test_the_body_that_ends_before_the_step(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    model = model_of()
    optimizer = wrap(hvd, model)

    def train() -> None:
        with Join([optimizer]):
            loss_of(model, 0, 0).backward()

    with pytest.raises(ValueError, match=r"ended after loss\.backward\(\) but before optimizer\.step\(\)"):
        train()
    with Join([optimizer]):
        optimizer.zero_grad()
        loss_of(model, 0, 0).backward()
        optimizer.step()
