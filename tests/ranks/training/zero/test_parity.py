"""DistributedDataParallel and ZeroRedundancyOptimizer in a Join context equal one process that sees all inputs."""

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
from hvlike.optim import ZeroRedundancyOptimizer


def check(hvd: ModuleType, name: str, schedule: str, passes: int, clip: float | None, *, view: bool) -> float:
    """Train on all ranks, compare, and return the largest difference."""
    counts = COUNTS[schedule](hvd.size())
    model = make(name)
    ddp = DistributedDataParallel(model, find_unused_parameters=name == "unused parameters")
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Adam, parameters_as_bucket_view=view, lr=0.01, eps=EPS)
    with Join([ddp, optimizer]):
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            for part in range(passes):
                with ddp.no_sync() if part < passes - 1 else nullcontext():
                    (ddp(inputs_of(step, part, hvd.rank()), step).square().mean() / passes).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
            optimizer.step()
    assert same_on_all_ranks([*model.parameters(), *model.buffers()])
    return difference(model, reference(name, counts, passes, clip))


@pytest.mark.parametrize(("name", "schedule", "passes", "clip"), CASES)
def test_all_inputs_in_one_process(hvd: ModuleType, name: str, schedule: str, passes: int, clip: float | None) -> None:
    assert check(hvd, name, schedule, passes, clip, view=passes == 2) < 1e-9
