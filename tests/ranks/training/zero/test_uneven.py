"""Uneven inputs: a rank that has run out of data goes on updating its share, and in the end all ranks are equal."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from support.training.zero_problem import batch, difference, loss_of, net
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from hvlike.errors import JoinError, UsageError
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.mpi(min_size=2)

Counts = Callable[[int], Sequence[int]]

SCHEDULES: dict[str, Counts] = {
    "rising": lambda size: range(3, 3 + size),
    "falling": lambda size: range(size, 0, -1),
    "none on the first rank": lambda size: [0, *[2] * (size - 1)],
    "none but on the last rank": lambda size: [*[0] * (size - 1), 3],
    "none at all": lambda size: [0] * size,
    "even": lambda size: [2] * size,
}


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float | None) -> None:
    """One step of one process."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("clip", "view"), [(None, False), (0.01, True)])
def test_gradients_that_are_equal(hvd: ModuleType, schedule: str, clip: float | None, view: bool) -> None:
    """All ranks see the same batch, as if another had reduced. Two contexts with the same optimizer."""
    counts = SCHEDULES[schedule](hvd.size())
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, parameters_as_bucket_view=view, lr=0.01)
    reference = Adam(plain.parameters(), lr=0.01)
    for epoch in range(2):
        with Join([optimizer]):
            for step in range(counts[hvd.rank()]):
                step_plain(ours, optimizer, loss_of(ours, batch(10 * epoch + step)), clip)
        for step in range(max(counts)):
            step_plain(plain, reference, loss_of(plain, batch(10 * epoch + step)), clip)
        assert difference(ours, plain) == 0
    step_plain(ours, optimizer, loss_of(ours, batch(30)), clip)
    step_plain(plain, reference, loss_of(plain, batch(30)), clip)
    assert difference(ours, plain) == 0


@pytest.mark.parametrize("schedule", ["none on the first rank", "none but on the last rank"])
def test_layers_that_were_thawed_since_it_was_made(hvd: ModuleType, schedule: str) -> None:
    """Owners without inputs update them as well, and send them."""
    counts = SCHEDULES[schedule](hvd.size())
    ours, plain = net(), net()
    for each in (ours, plain):
        each.requires_grad_(False)
        next(iter(each.parameters())).requires_grad_(True)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=0.01)
    reference = SGD(plain.parameters(), lr=0.01)
    for each in (ours, plain):
        each.requires_grad_(True)
    with Join([optimizer]):
        for step in range(counts[hvd.rank()]):
            step_plain(ours, optimizer, loss_of(ours, batch(step)), None)
    for step in range(max(counts)):
        step_plain(plain, reference, loss_of(plain, batch(step)), None)
    assert difference(ours, plain) == 0


def test_options_follow_those_who_go_on(hvd: ModuleType) -> None:
    """A scheduler that only the last rank still moves, and whose last move no step has carried."""
    ours, plain = net(), net()
    optimizer, reference = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=0.1), SGD(plain.parameters(), lr=0.1)
    schedulers = [StepLR(each, 1, 0.5) for each in (optimizer, reference)]
    with Join([optimizer]):
        for step in range(1 + hvd.rank()):
            step_plain(ours, optimizer, loss_of(ours, batch(step)), None)
            schedulers[0].step()
    for step in range(hvd.size()):
        step_plain(plain, reference, loss_of(plain, batch(step)), None)
        schedulers[1].step()
    assert difference(ours, plain) == 0
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_horovods_join(hvd: ModuleType) -> None:
    ours, plain = net(), net()
    optimizer, reference = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.01), Adam(plain.parameters(), lr=0.01)
    for epoch in range(2):
        for step in range(2 * hvd.rank()):
            step_plain(ours, optimizer, loss_of(ours, batch(10 * epoch + step)), None)
        hvd.join()
        for step in range(2 * (hvd.size() - 1)):
            step_plain(plain, reference, loss_of(plain, batch(10 * epoch + step)), None)
        assert difference(ours, plain) == 0


def test_the_end_of_the_body_between_clipping_and_step(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)

    def body() -> None:
        with Join([optimizer]):
            loss_of(model, batch(0)).backward()
            hvd.clip_grad_norm_(optimizer, 1.0)

    with pytest.raises((UsageError, JoinError), match="has ended after gradients were reduced"):
        body()
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_an_exception_on_one_rank_reaches_all_and_the_next_context_works(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    failing = hvd.size() - 1
    expected: tuple[type[Exception], str] = (
        (ZeroDivisionError, "mine") if hvd.rank() == failing else (JoinError, f"Rank {failing} has left .*mine")
    )

    def body() -> None:
        with Join([optimizer]):
            for step in range(0 if hvd.rank() == 0 else 3):
                if step == 1 and hvd.rank() == failing:
                    raise ZeroDivisionError("mine")
                step_plain(model, optimizer, loss_of(model, batch(step)), None)

    with pytest.raises(expected[0], match=expected[1]):
        body()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with Join([optimizer]):
        for step in range(hvd.rank()):
            step_plain(model, optimizer, loss_of(model, batch(step)), None)
    assert same_on_all_ranks(model.parameters())


def test_a_scaler_while_ranks_are_absent_is_refused(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def body() -> None:
        with Join([optimizer]):
            for step in range(1 + hvd.rank()):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(step))).backward()
                scaler.step(optimizer)
                scaler.update()

    with pytest.raises((UsageError, JoinError), match="cannot use a GradScaler while some ranks are out of data"):
        body()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_groups_are_not_added_inside_a_context(hvd: ModuleType) -> None:
    model = net()
    first, *others = model.parameters()
    optimizer = ZeroRedundancyOptimizer(others, SGD, lr=0.01)
    with Join([optimizer]), pytest.raises(UsageError, match="inside a Join context"):
        optimizer.add_param_group({"params": [first]})
    optimizer.add_param_group({"params": [first]})
    assert len(optimizer.param_groups) == 2
