"""What compression has left over survives the loss of ranks: no part of a gradient is lost or counted twice."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Run
from support.training.pretended_loss import COMMIT, after_loss, give_back

from hvlike.collectives.compression import PowerSGD, StatefulCompressor, TopK
from hvlike.training.elastic.local_state import LocalStates

SHAPES = [(8, 12), (7,)]


def compressors() -> list[StatefulCompressor]:
    """One of each kind that remembers."""
    return [PowerSGD(start_powerSGD_iter=0, min_compression_rate=0.1), TopK(ratio=0.2)]


def errors_of(rank: int) -> dict[str, torch.Tensor]:
    """What a rank has left over."""
    generator = torch.Generator().manual_seed(rank)
    return {"p0": torch.randn(8, 12, generator=generator), "p1": torch.randn(7, generator=generator)}


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_what_is_left_over_is_the_same_part_of_the_result(hvd: ModuleType, op: str) -> None:
    before = hvd.size() + 1
    states = {
        rank: {"process_set": 0, "rank": rank, "size": before, "errors": errors_of(rank)} for rank in range(before)
    }
    for lost in range(before):
        run = Run(hvd, TopK(k=1), SHAPES, op=getattr(hvd, op))
        give_back(after_loss(hvd, states, [lost]), COMMIT, run.optimizer)
        now = hvd.allreduce(run.errors()["p0"], op=getattr(hvd, op), name=f"errors.{lost}")
        expected = torch.stack([state["errors"]["p0"] for state in states.values()]).sum(dim=0)
        expected = expected / before if op == "Average" else expected
        assert torch.allclose(now, expected, atol=1e-5)


def test_the_next_step_uses_it(hvd: ModuleType) -> None:
    before = hvd.size() + 1
    states = {
        rank: {"process_set": 0, "rank": rank, "size": before, "errors": {"p0": errors_of(rank)["p0"].flatten()}}
        for rank in range(before)
    }
    # Everything but one element is sent, of gradients that are zero: the result is what was left over.
    run = Run(hvd, TopK(k=95), [(8, 12)])
    give_back(after_loss(hvd, states, [0]), COMMIT, run.optimizer)
    (result,) = run.step_with([torch.zeros(8, 12)])
    left = hvd.allreduce(run.errors()["p0"], name="left").view(8, 12)
    mean = torch.stack([errors_of(rank)["p0"] for rank in range(before)]).mean(dim=0)
    assert torch.allclose(result + left, mean, atol=1e-5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_spare_goes_on_with_the_memory_of_the_lost_rank(hvd: ModuleType, kind: int) -> None:
    first = Run(hvd, compressors()[kind], SHAPES)
    second = Run(hvd, compressors()[kind], SHAPES)
    held = LocalStates("optimizer")
    for step in range(3):
        first.step(step)
        second.step(step)
    shared = common(first)
    held.save(1, first.optimizer.local_state_dict)
    first.step(7)
    if hvd.rank() == 1:
        held, first = LocalStates("optimizer"), Run(hvd, compressors()[kind], SHAPES)
    hvd.shutdown()
    hvd.init()
    expected = [second.step(step) for step in range(3, 5)]
    first.optimizer.load_state_dict(hvd.broadcast_object(shared, 0, name="shared"))
    give_back(held, 1, first.optimizer)
    assert held_by(first) != {} or kind == 0
    # A commit before the first step keeps what was given back.
    held.save(2, first.optimizer.local_state_dict)
    give_back(held, 2, first.optimizer)
    first.parameters = [each for group in first.optimizer.param_groups for each in group["params"]]
    for step in range(3, 5):
        got = first.step(step)
        assert all(torch.equal(one, other) for one, other in zip(got, expected[step - 3], strict=True))


def common(run: Run) -> dict[str, Any]:
    """The state without the errors of this rank."""
    state = run.optimizer.state_dict()
    return state | {"compression": state["compression"] | {"errors": {}}}


def held_by(run: Run) -> dict[str, torch.Tensor]:
    """What the next step takes up."""
    return run.compression.errors_of((run.hvd.rank(), run.hvd.size()))
