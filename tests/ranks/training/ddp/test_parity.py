"""DistributedDataParallel, and DistributedOptimizer, in a Join context equal one process that sees all inputs."""

from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from support.training.parity import CASES, COUNTS, EPS, inputs_of, make, reference
from support.training.problem import same_on_all_ranks
from support.training.zero_problem import difference
from torch.optim import Adam

from hvlike.join import Join
from hvlike.nn import DistributedDataParallel


@pytest.mark.parametrize(("name", "schedule", "passes", "clip"), CASES)
def test_of_a_module(hvd: ModuleType, name: str, schedule: str, passes: int, clip: float | None) -> None:
    counts = COUNTS[schedule](hvd.size())
    # In turn: for each model, and for each schedule.
    by_active = passes == 2
    model = make(name)
    ddp = DistributedDataParallel(model, find_unused_parameters=name == "unused parameters")
    optimizer = Adam(ddp.parameters(), lr=0.01, eps=EPS)
    with ddp.join(divide_by_initial_world_size=not by_active):
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            for part in range(passes):
                with ddp.no_sync() if part < passes - 1 else nullcontext():
                    (ddp(inputs_of(step, part, hvd.rank()), step).square().mean() / passes).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
            optimizer.step()
    assert same_on_all_ranks([*model.parameters(), *model.buffers()])
    assert difference(model, reference(name, counts, passes, clip, by_active=by_active)) < 1e-9


@pytest.mark.parametrize(("name", "schedule", "passes", "clip"), CASES[::2])
def test_of_an_optimizer(hvd: ModuleType, name: str, schedule: str, passes: int, clip: float | None) -> None:
    counts = COUNTS[schedule](hvd.size())
    by_active = passes == 2
    model = make(name)
    optimizer = hvd.DistributedOptimizer(
        Adam(model.parameters(), lr=0.01, eps=EPS), model.named_parameters(), backward_passes_per_step=passes
    )
    with Join([optimizer], divide_by_initial_world_size=not by_active):
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            for part in range(passes):
                (model(inputs_of(step, part, hvd.rank()), step).square().mean() / passes).backward()
            if clip is not None:
                hvd.clip_grad_norm_(optimizer, clip)
            optimizer.step()
    assert same_on_all_ranks(model.parameters())
    assert difference(model, reference(name, counts, passes, clip, by_active=by_active)) < 1e-9
