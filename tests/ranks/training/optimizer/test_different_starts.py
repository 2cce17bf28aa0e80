"""Ranks whose models differ before the first step are told so: averaged gradients do not make them equal."""

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, share, whole_batch
from torch import nn

from hvlike.collectives.requests.plan import find_apart
from hvlike.nn import DistributedDataParallel
from hvlike.training.gradients.parameters import value_checksums


def warnings_of_two_steps(
    hvd: ModuleType, caplog: pytest.LogCaptureFixture, model: nn.Module, **options: Any
) -> Sequence[str]:
    """What is logged on this rank."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(step))).backward()
            optimizer.step()
    return [record.getMessage() for record in caplog.records if "parameters differ" in record.getMessage()]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_the_first_rank_warns_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture, op: str) -> None:
    model = make_model()
    if hvd.rank() == hvd.size() - 1:
        nn.init.ones_(model[2].weight)
    found = warnings_of_two_steps(hvd, caplog, model, op=getattr(hvd, op))
    assert len(found) == (hvd.rank() == 0)
    for text in found:
        assert f"'2.weight' of rank {hvd.size() - 1} is not that of rank 0" in text
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in text


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_ranks_that_start_alike_hear_nothing(hvd: ModuleType, caplog: pytest.LogCaptureFixture, op: str) -> None:
    model = make_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not warnings_of_two_steps(hvd, caplog, model, op=getattr(hvd, op))


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
