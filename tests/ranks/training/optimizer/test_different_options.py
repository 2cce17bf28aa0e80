"""A rank whose optimizer has other options, or steps less often, is named: nothing else would show it."""

import logging
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, share, whole_batch

from hvlike.collectives.requests.plan import find_difference
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.gradients.parameters import describe_options


def names(text: str, value: str, other: str, rank: int) -> bool:
    """Whether this rank is named with its other value, and one of its neighbours: the one that hears of it first."""
    both = rf"{value} on rank \d+, {other} on rank {rank}\.|{other} on rank {rank}, {value} on rank \d+\."
    return re.search(both, text) is not None


pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def said(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What was logged about options; call it on every rank."""
    with caplog.at_level(logging.WARNING, logger="hvlike"):

        def found() -> list[str]:
            # What a rank has sent comes before what it asks for.
            hvd.allgather_object(0)
            hvd.allgather_object(0)
            return [text for text in (each.getMessage() for each in caplog.records) if "drifts apart" in text]

        yield found


def train(hvd: ModuleType, model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()


def optimizer_of(hvd: ModuleType, model: torch.nn.Module, kind: str, lr: float) -> Any:
    if kind == "ZeRO":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, reduce_gradients=True, lr=lr)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), op=getattr(hvd, kind))


@pytest.mark.parametrize("kind", ["Average", "Adasum", "ZeRO"])
def test_a_learning_rate_that_differs_is_named_once(hvd: ModuleType, said: Any, kind: str) -> None:
    model, last = make_model(), hvd.size() - 1
    train(hvd, model, optimizer_of(hvd, model, kind, 0.05 if hvd.rank() == last else 0.1), 10)
    found = said()
    assert len(found) == (hvd.rank() == 0)
    for text in found:
        assert "lr of parameter group 0" in text
        assert names(text, "0.1", "0.05", last)
        assert "hvd.broadcast_optimizer_state(optimizer, root_rank=0)" in text


@pytest.mark.parametrize("changing", [0, 1])
def test_a_change_on_one_rank_is_named(hvd: ModuleType, said: Any, changing: int) -> None:
    model = make_model()
    optimizer = optimizer_of(hvd, model, "Average", 0.1)
    train(hvd, model, optimizer, 3)
    assert not said()
    if hvd.rank() == changing:
        optimizer.param_groups[0]["momentum"] = 0.5
    train(hvd, model, optimizer, 6)
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all("momentum of parameter group 0" in text and f"0.5 on rank {changing}" in text for text in found)


def test_a_rank_that_does_not_use_a_reduction_is_named(hvd: ModuleType, said: Any) -> None:
    model = make_model()
    optimizer = optimizer_of(hvd, model, "Average", 0.1)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.synchronize()
        if step != 4 or hvd.rank() == 0:
            with optimizer.skip_synchronize():
                optimizer.step()
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all("reductions that no step() has used" in text and "0 on rank 0, 1 on rank" in text for text in found)


def test_a_rank_that_leaves_out_the_last_step_is_named_before_the_end(hvd: ModuleType, said: Any) -> None:
    model, last = make_model(), hvd.size() - 1
    optimizer = optimizer_of(hvd, model, "Average", 0.1)
    train(hvd, model, optimizer, 6)
    loss_of(model, share(hvd, whole_batch(6))).backward()
    optimizer.synchronize()
    if hvd.rank() != last:
        with optimizer.skip_synchronize():
            optimizer.step()
    assert not said()
    hvd.shutdown()
    hvd.init()
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all(names(text, "0", "1", last) for text in found)


@pytest.mark.parametrize("kind", ["Average", "Adasum", "ZeRO"])
def test_ranks_with_one_input_and_with_several_use_all_reductions(hvd: ModuleType, said: Any, kind: str) -> None:
    model = make_model()
    optimizer = optimizer_of(hvd, model, kind, 0.1)
    for _ in range(2):
        with Join([optimizer]):
            train(hvd, model, optimizer, 1 if hvd.rank() == hvd.size() - 1 else 4)
    train(hvd, model, optimizer, 4)
    assert not said()


@pytest.mark.parametrize("kind", ["Average", "Adasum", "ZeRO"])
def test_options_that_change_alike_are_no_news(hvd: ModuleType, said: Any, kind: str) -> None:
    model = make_model()
    optimizer = optimizer_of(hvd, model, kind, 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(8):
        train(hvd, model, optimizer, 1)
        schedule.step()
    assert not said()


@pytest.mark.pure
def test_options_as_text() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "name": "a", "other": object()},
        {"params": [], "lr": 1, "foreach": None},
    ]
    assert describe_options(groups) == (
        ("lr of parameter group 0", "0.5"),
        ("betas of parameter group 0", "(0.9, 0.99)"),
        ("name of parameter group 0", "'a'"),
        ("lr of parameter group 1", "1"),
        ("foreach of parameter group 1", "None"),
    )


@pytest.mark.pure
def test_the_first_difference() -> None:
    assert find_difference((("a", "1"), ("b", "2")), (("b", "2"), ("a", "1"))) is None
    assert find_difference((("a", "1"), ("b", "2")), (("a", "1"), ("b", "3"))) == ("b", "2", "3")
    assert find_difference((("a", "1"),), (("a", "1"), ("c", "3"))) == ("c", "nothing", "3")


@pytest.mark.parametrize("kind", ["Average", "Adasum", "ZeRO"])
@pytest.mark.parametrize("differs", [True, False])
def test_the_scale_of_a_grad_scaler(hvd: ModuleType, said: Any, kind: str, differs: bool) -> None:
    """A scaler keeps its scale for itself, and unscales by it what all ranks have reduced."""
    model = make_model()
    optimizer = optimizer_of(hvd, model, kind, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if differs and hvd.rank() == 1 else 4.0, growth_interval=3)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, share(hvd, whole_batch(step)))).backward()
        scaler.step(optimizer)
        scaler.update()
    found = said()
    assert len(found) == (differs and hvd.rank() == 0)
    for text in found:
        assert "scale of the GradScaler" in text
        assert names(text, "4.0", "8.0", 1)
