"""Ranks that drift apart are named, as nothing else would show it: other options, fewer steps, another start.

Averaged gradients do not make them equal. A ZeroRedundancyOptimizer that does not reduce looks at gradients, too.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, share, whole_batch
from support.training.ways import Wrapped
from support.training.zero_problem import average_gradients
from torch import nn
from torch.optim import SGD

from hvlike.collectives.requests.plan import find_apart, find_difference
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.gradients.parameters import describe_options, value_checksums


def names(text: str, value: str, other: str, rank: int) -> bool:
    """Whether this rank is named with its other value, and one of its neighbours: the one that hears of it first."""
    both = rf"{value} on rank \d+, {other} on rank {rank}\.|{other} on rank {rank}, {value} on rank \d+\."
    return re.search(both, text) is not None


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


def train(hvd: ModuleType, wrapped: Wrapped, steps: int) -> None:
    for step in range(steps):
        wrapped.step(hvd, step)


WAYS = ["optimizer", "adasum", "zero"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_learning_rate_that_differs_is_named_once(hvd: ModuleType, said: Any, way: str) -> None:
    last = hvd.size() - 1
    train(hvd, Wrapped(way, make_model(), lr=0.05 if hvd.rank() == last else 0.1), 10)
    found = said()
    assert len(found) == (hvd.rank() == 0)
    for text in found:
        assert "lr of parameter group 0" in text
        assert names(text, "0.1", "0.05", last)
        assert "hvd.broadcast_optimizer_state(optimizer, root_rank=0)" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("changing", [0, 1])
def test_a_change_on_one_rank_is_named(hvd: ModuleType, said: Any, changing: int) -> None:
    wrapped = Wrapped("optimizer", make_model())
    train(hvd, wrapped, 3)
    assert not said()
    if hvd.rank() == changing:
        wrapped.optimizer.param_groups[0]["momentum"] = 0.5
    train(hvd, wrapped, 6)
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all("momentum of parameter group 0" in text and f"0.5 on rank {changing}" in text for text in found)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_use_a_reduction_is_named(hvd: ModuleType, said: Any) -> None:
    wrapped = Wrapped("optimizer", make_model())
    for step in range(10):
        wrapped.optimizer.zero_grad()
        loss_of(wrapped.module, share(hvd, whole_batch(step))).backward()
        wrapped.optimizer.synchronize()
        if step != 4 or hvd.rank() == 0:
            with wrapped.optimizer.skip_synchronize():
                wrapped.optimizer.step()
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all("reductions that no step() has used" in text and "0 on rank 0, 1 on rank" in text for text in found)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_leaves_out_the_last_step_is_named_before_the_end(hvd: ModuleType, said: Any) -> None:
    last, wrapped = hvd.size() - 1, Wrapped("optimizer", make_model())
    train(hvd, wrapped, 6)
    loss_of(wrapped.module, share(hvd, whole_batch(6))).backward()
    wrapped.optimizer.synchronize()
    if hvd.rank() != last:
        with wrapped.optimizer.skip_synchronize():
            wrapped.optimizer.step()
    assert not said()
    hvd.shutdown()
    hvd.init()
    found = said()
    assert len(found) == (hvd.rank() == 0)
    assert all(names(text, "0", "1", last) for text in found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_one_input_and_with_several_use_all_reductions(hvd: ModuleType, said: Any, way: str) -> None:
    wrapped = Wrapped(way, make_model())
    for _ in range(2):
        with Join(wrapped.joinables):
            train(hvd, wrapped, 1 if hvd.rank() == hvd.size() - 1 else 4)
    train(hvd, wrapped, 4)
    assert not said()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_options_that_change_alike_are_no_news(hvd: ModuleType, said: Any, way: str) -> None:
    wrapped = Wrapped(way, make_model())
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped.optimizer, 0.9)
    for _ in range(8):
        train(hvd, wrapped, 1)
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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("differs", [True, False])
def test_the_scale_of_a_grad_scaler(hvd: ModuleType, said: Any, way: str, differs: bool) -> None:
    """A scaler keeps its scale for itself, and unscales by it what all ranks have reduced."""
    wrapped = Wrapped(way, make_model())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if differs and hvd.rank() == 1 else 4.0, growth_interval=3)
    for step in range(5):
        wrapped.optimizer.zero_grad()
        scaler.scale(loss_of(wrapped.module, share(hvd, whole_batch(step)))).backward()
        scaler.step(wrapped.optimizer)
        scaler.update()
    found = said()
    assert len(found) == (differs and hvd.rank() == 0)
    for text in found:
        assert "scale of the GradScaler" in text
        assert names(text, "4.0", "8.0", 1)


def warnings_of_two_steps(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, model: nn.Module, way: str
) -> Sequence[str]:
    """What is logged on this rank."""
    wrapped = Wrapped(way, model)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        train(hvd, wrapped, 2)
    return [record.getMessage() for record in caplog.records if "parameters differ" in record.getMessage()]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["optimizer", "adasum"])
def test_the_first_rank_warns_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture, way: str) -> None:
    model = make_model()
    if hvd.rank() == hvd.size() - 1:
        nn.init.ones_(model[2].weight)
    found = warnings_of_two_steps(hvd, caplog, model, way)
    assert len(found) == (hvd.rank() == 0)
    for text in found:
        assert f"'2.weight' of rank {hvd.size() - 1} is not that of rank 0" in text
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in text


@pytest.mark.parametrize("way", ["optimizer", "adasum"])
def test_ranks_that_start_alike_hear_nothing(hvd: ModuleType, caplog: pytest.LogCaptureFixture, way: str) -> None:
    model = make_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not warnings_of_two_steps(hvd, caplog, model, way)


class Counting(nn.Module):
    """It has a buffer that depends on the rank."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("mean", torch.tensor([value]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def warnings_of_ddp(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, module: nn.Module, **options: Any
) -> Sequence[str]:
    ddp = DistributedDataParallel(module, **options)
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        for _ in range(2):
            loss_of(ddp, share(hvd, whole_batch())).backward()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.mpi(min_size=2)
def test_a_module_that_starts_as_it_is_is_looked_at(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    found = warnings_of_ddp(hvd, caplog, make_model(seed=hvd.rank()), init_sync=False)
    assert len(found) == (hvd.rank() == 0)
    assert all("parameters differ" in text and "'0.weight' of rank 1 is not that of rank 0" in text for text in found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("init_sync", [True, False])
def test_buffers_that_stay_different_are_named(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, init_sync: bool
) -> None:
    module = Counting(float(hvd.rank() == hvd.size() - 1))
    found = warnings_of_ddp(hvd, caplog, module, init_sync=init_sync, broadcast_buffers=False)
    assert len(found) == (hvd.rank() == 0)
    assert all("buffers differ" in text and f"'buffer mean' of rank {hvd.size() - 1} is not" in text for text in found)


@pytest.mark.parametrize("options", [{}, {"init_sync": False}, {"forward_sync_buffers": False}])
def test_buffers_that_become_those_of_one_rank_are_not(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    assert not warnings_of_ddp(hvd, caplog, Counting(float(hvd.rank())), **options)


@pytest.mark.pure
def test_fingerprints() -> None:
    parameters = [
        torch.zeros(3),
        torch.zeros(2, 30).t(),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64),
        torch.arange(40.0),
    ]
    before = value_checksums(parameters)
    assert before == value_checksums([each.clone() for each in parameters])
    for index in (0, 1, 2, 4, 5):
        parameters[index][(0,) * parameters[index].dim()] = 7
        after = value_checksums(parameters)
        assert [one != other for one, other in zip(before, after, strict=True)] == [each == index for each in range(6)]
        before = after


@pytest.mark.pure
@pytest.mark.parametrize(
    ("starts", "apart"),
    [
        ([(1, 2), (1, 2)], None),
        ([(1, 2), (1, 2), (1, 3)], (2, 1)),
        ([(1, 2), (), (1, 2)], None),
        ([(), (1, 2)], None),
        ([(1,)], None),
    ],
)
def test_who_differs(starts: list[tuple[int, ...]], apart: tuple[int, int] | None) -> None:
    assert find_apart(starts) == apart


def warnings_of_zero(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, *, averages: bool, joins: bool = False, **options: Any
) -> int:
    """How often two steps with gradients of each rank's own are warned of on this rank."""
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hvlike"), Join([optimizer], enable=joins):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
            if averages:
                average_gradients(hvd, model)
            optimizer.step()
    return sum("the gradients differ" in record.getMessage() for record in caplog.records)


def test_gradients_that_differ_are_named_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_zero(hvd, caplog, averages=False) == (hvd.rank() == 0 and hvd.size() > 1)


def test_gradients_that_are_averaged_are_well(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_zero(hvd, caplog, averages=True) == 0
    assert warnings_of_zero(hvd, caplog, averages=False, reduce_gradients=True) == 0


def test_in_a_join_context_nobody_is_asked(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_zero(hvd, caplog, averages=False, joins=True) == 0


def test_a_rank_that_has_joined_is_not_asked(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        if hvd.rank() < max(1, hvd.size() - 1):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.join()
    assert not [record for record in caplog.records if "the gradients differ" in record.getMessage()]
