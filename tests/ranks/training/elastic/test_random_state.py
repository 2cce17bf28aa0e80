"""RandomState: what was drawn after a commit is drawn again after going back to it, on each rank its own."""

import random
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from hvlike.elastic import RandomState, TorchState


def draw() -> list[float]:
    """One number of each generator."""
    return [
        torch.rand(1).item(),
        random.random(),
        float(np.random.rand()),  # noqa: NPY002
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]


def test_steps_that_are_repeated_draw_the_same(hvd: ModuleType) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + hvd.rank())
    state = TorchState(random=RandomState(), step=0)
    state.sync()
    state.commit()
    drawn = [draw() for _ in range(3)]
    # As elastic.run does it after an error.
    state.restore()
    state.on_reset()
    state.sync()
    assert [draw() for _ in range(3)] == drawn
    everybody = hvd.allgather_object(drawn)
    assert len({tuple(first) for first, *_ in everybody}) == hvd.size(), "each rank has numbers of its own"


def test_a_checkpoint_has_those_of_all_ranks(hvd: ModuleType, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path))
    torch.manual_seed(5 + hvd.rank())
    hvd.checkpoint.save(folder, 1, random=RandomState())
    drawn = draw()
    draw()
    hvd.checkpoint.load(folder, random=RandomState())
    assert draw() == drawn
