"""A thread that joins stands in for its rank: other threads of the rank cannot use the process set meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hvlike.collectives.api.barrier_join import begin_join
from hvlike.collectives.session.context import current
from hvlike.errors import JoinError, UsageError
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.mpi(min_size=2)

PATIENCE_SECONDS = 20.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def tried(hvd: ModuleType) -> Iterator[Path]:
    """A file that rank 1 makes when its other thread has tried to go on."""
    with TemporaryDirectory() as folder:
        yield Path(hvd.broadcast_object(folder, root_rank=0), "tried")
        hvd.barrier()


class Training:
    """A model and an optimizer with a name of their own."""

    def __init__(self, hvd: ModuleType, name: str, *, zero: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        parameters = list(self.model.parameters())
        if zero:
            self.optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, reduce_gradients=True, lr=0.1)
        else:
            named = [(f"{name}.{part}", each) for part, each in self.model.named_parameters()]
            self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()


def joins(training: Training, way: str, hvd: ModuleType) -> None:
    """End without a step."""
    if way == "context":
        with Join([training.optimizer]):
            pass
    else:
        hvd.join()


def goes_on(training: Training, way: str, tried: Path) -> None:
    """Make steps until rank 1 has tried to."""

    def body() -> None:
        for _ in range(3):
            training.step()
        wait_for(tried.exists)

    if way == "context":
        with Join([training.optimizer]):
            body()
    else:
        body()


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("way", ["context", "call"])
@pytest.mark.parametrize("what", ["optimizer", "zero", "allreduce"])
def test_another_thread_goes_on(
    hvd: ModuleType, tried: Path, monkeypatch: pytest.MonkeyPatch, what: str, way: str, early: bool
) -> None:
    """early: it tries to before the other ranks know of the thread that joins."""
    if early and hvd.rank() == 1:

        def begin_later(*arguments: Any) -> Any:
            wait_for(tried.exists)
            return begin_join(*arguments)

        for module in ("training.join_round", "collectives.api.barrier_join"):
            monkeypatch.setattr(f"hvlike.{module}.begin_join", begin_later)
    first, second = Training(hvd, "first"), Training(hvd, "second", zero=what == "zero")
    for each in (first, second, second):
        each.step()
    before = [each.detach().clone() for each in second.model.parameters()]
    if hvd.rank() == 1:
        proxies = current().find_set(None, "test").proxies
        thread = threading.Thread(target=joins, args=(first, way, hvd))
        thread.start()
        wait_for(lambda: proxies.stands_in)
        try:
            with pytest.raises(UsageError, match=r"another thread of this rank has called hvd\.join\(\)"):
                second.step() if what != "allreduce" else hvd.allreduce(torch.ones(1), name="metric")
        finally:
            tried.touch()
            thread.join()
    else:
        goes_on(first, way, tried)
        if way == "call":
            hvd.join()
    assert all(map(torch.equal, second.model.parameters(), before))
    hvd.broadcast_parameters(first.model.state_dict(), root_rank=0)
    # All of it works as before.
    first.step()
    second.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_another_thread_is_between_backward_and_step(hvd: ModuleType) -> None:
    """All ranks alike: whoever joins first is told, and the others of it."""
    first, second = Training(hvd, "first"), Training(hvd, "second")
    second.step()
    second.model(torch.ones(1, 3)).sum().backward()
    with (
        pytest.raises(
            (UsageError, JoinError), match=r"Join context was left between backward and step: .*being reduced"
        ),
        Join([first.optimizer]),
    ):
        pass
    second.optimizer.step()
    first.step()
