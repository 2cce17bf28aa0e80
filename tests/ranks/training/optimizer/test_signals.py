"""A signal handler that raises in the middle of a step: that rank leaves the step, and all ranks learn of it."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.training.problem import loss_of, make_model, same_on_all_ranks, whole_batch
from torch.optim import SGD

from hvlike.errors import HorovodInternalError
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.mpi(min_size=2)


class Late(Exception):
    pass


def refuse(number: int, frame: object) -> None:
    raise Late


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, refuse)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["Average", "Adasum", "ZeRO"])
def test_all_learn_of_it_and_can_begin_again(hvd: ModuleType, handler: None, tmp_path: Path, kind: str) -> None:
    left = Path(hvd.broadcast_object(str(tmp_path), 0)) / "left"
    model = make_model()
    optimizer: Any
    if kind == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    else:
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=getattr(hvd, kind))

    def step(*, interrupted: bool = False) -> bool:
        """Whether it has ended well."""
        try:
            optimizer.zero_grad()
            loss_of(model, whole_batch()).backward()
            if interrupted:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            optimizer.step()
        except (Late, HorovodInternalError):
            return False
        return True

    for _ in range(3):
        assert step()
    if hvd.rank() == 1:
        # The others are not there yet: it waits for them.
        assert not step(interrupted=True)
        left.touch()
        assert not step()
    else:
        while not left.exists():
            time.sleep(0.01)
        assert not (step() and step())
    hvd.shutdown()
    hvd.init()
    if kind == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=True, lr=0.1)
    else:
        optimizer.abandon()
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        assert step()
    assert same_on_all_ranks(model.parameters())
