"""DistributedOptimizer in a Join context: uneven inputs train as one process would, and all ranks end equal."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Doubles
from support.training.counters import AFTER, Counter
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

from hvlike.join import Join


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss: Tensor = model(data).pow(2).mean()
    return loss


def reference(counts: Sequence[int], make: Any, *, effective: bool, clip: float | None = None, passes: int = 1) -> Any:
    """One process: in each step the gradients of the ranks that still have inputs, over all or over those."""
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(max(counts) // passes):
        active = [rank for rank, count in enumerate(counts) if step < count // passes]
        optimizer.zero_grad()
        for rank in active:
            for each in range(passes):
                (loss_of(model, rank, step * passes + each) / (len(active) if effective else len(counts))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def assert_equal_to(model: nn.Module, expected: nn.Module) -> None:
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-4, atol=1e-6)


def assert_same_everywhere(hvd: ModuleType, model: nn.Module, optimizer: Any) -> None:
    """Parameters, buffers, optimizer state and options are equal, bitwise."""
    assert same_on_all_ranks(model.state_dict().values())
    options = [[(key, group[key]) for key in group if key != "params"] for group in optimizer.param_groups]
    everybody = hvd.allgather_object(options)
    assert all(each == options for each in everybody)
    states = hvd.allgather_object(
        [
            (key, index, value.tolist() if isinstance(value, Tensor) else value)
            for index, entry in sorted(optimizer.state_dict()["state"].items())
            for key, value in sorted(entry.items())
        ]
    )
    assert all(state == states[0] for state in states)


COUNTS = [[2, 0, 3, 1], [0, 4, 1, 4], [3, 3, 3, 3]]


@pytest.mark.parametrize("effective", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_equals_one_process(hvd: ModuleType, kind: str, effective: bool) -> None:
    rank, size = hvd.rank(), hvd.size()

    def make(parameters: Any) -> torch.optim.Optimizer:
        if kind == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for counts in [each[:size] for each in COUNTS]:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
        with Join([optimizer], divide_by_initial_world_size=not effective):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        expected, plain = reference(counts, make, effective=effective)
        assert_equal_to(model, expected)
        assert_same_everywhere(hvd, model, optimizer)
        assert len(optimizer.state_dict()["state"]) == len(plain.state_dict()["state"])


@pytest.mark.parametrize("effective", [False, True])
def test_clipping_between_synchronize_and_step(hvd: ModuleType, effective: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    counts = COUNTS[0][:size]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model = model_of()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
    with Join([optimizer], divide_by_initial_world_size=not effective):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert_equal_to(model, reference(counts, make, effective=effective, clip=0.05)[0])
    assert_same_everywhere(hvd, model, optimizer)


@pytest.mark.parametrize("way", ["passes", "no_sync"])
def test_accumulation(hvd: ModuleType, way: str) -> None:
    rank, size, passes = hvd.rank(), hvd.size(), 2
    counts = [passes * each for each in COUNTS[1][:size]]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), backward_passes_per_step=passes if way == "passes" else 1
    )
    with Join([optimizer]):
        for step in range(0, counts[rank], passes):
            optimizer.zero_grad()
            if way == "passes":
                loss_of(model, rank, step).backward()
            else:
                with optimizer.no_sync():
                    loss_of(model, rank, step).backward()
            loss_of(model, rank, step + 1).backward()
            optimizer.step()
    assert_equal_to(model, reference(counts, make, effective=False, passes=passes)[0])
    assert_same_everywhere(hvd, model, optimizer)


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
        assert_same_everywhere(hvd, model, optimizer)
        assert inner.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**steps)


def test_statistics_of_batch_norm_come_from_the_authority(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with Join([optimizer]) as join:
        for step in range(2 * (size - rank)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    assert join.authority == 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=join.authority)
    assert_same_everywhere(hvd, model, optimizer)
    with Join([optimizer], enable=False) as join:
        pass
    assert join.authority == size - 1


def test_two_optimizers_with_different_numbers_of_steps(hvd: ModuleType) -> None:
    rank = hvd.rank()
    models = [model_of(0), model_of(1)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for model in models
    ]
    with Join(optimizers):
        for step in range(rank + 1):
            for model, optimizer, times in zip(models, optimizers, (2, 1), strict=True):
                for _ in range(times):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert_same_everywhere(hvd, model, optimizer)


def test_beside_a_joinable_of_ones_own(hvd: ModuleType) -> None:
    """Then the heartbeat goes on, and what the other one does is shadowed by its hook alone."""
    rank, size = hvd.rank(), hvd.size()
    counts = COUNTS[1][:size]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for own_first in (True, False):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
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
        assert_equal_to(model, reference(counts, make, effective=False)[0])
        assert_same_everywhere(hvd, model, optimizer)


@pytest.mark.mpi(min_size=2)
def test_throw_on_early_termination(hvd: ModuleType) -> None:
    rank = hvd.rank()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
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
        assert_same_everywhere(hvd, model, optimizer)


def test_adasum(hvd: ModuleType) -> None:
    """What steps have changed is reduced; each rank's momentum is its own."""
    rank = hvd.rank()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
    )
    for _ in range(2):
        with Join([optimizer]):
            for step in range(rank):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        assert same_on_all_ranks(model.parameters())


def test_a_compressor_of_the_program_and_no_input_at_all(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=Doubles(),
    )
    for epoch in range(3):
        with Join([optimizer]):
            for step in range(2 * ((rank + epoch) % size)):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        assert_same_everywhere(hvd, model, optimizer)


def test_a_grad_scaler(hvd: ModuleType) -> None:
    rank = hvd.rank()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Join([optimizer]):
        for step in range(rank + 1):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * (torch.inf if step == 0 and rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_same_everywhere(hvd, model, optimizer)


def test_the_body_that_ends_before_the_step(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def train() -> None:
        with Join([optimizer]):
            loss_of(model, 0, 0).backward()

    with pytest.raises(ValueError, match=r"ended after loss\.backward\(\) but before optimizer\.step\(\)"):
        train()
    with Join([optimizer]):
        optimizer.zero_grad()
        loss_of(model, 0, 0).backward()
        optimizer.step()
