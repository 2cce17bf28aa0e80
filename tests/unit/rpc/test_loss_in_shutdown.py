"""A graceful shutdown says once that a worker has vanished, however fast the others agree on the end without it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.errors import WorkerLostError
from hvlike.rpc.agent.shutdown import WORK, SessionShutdown


class LastWorker:
    """An agent that is the only one left; what it starts in the loop is done at once."""

    def __init__(self) -> None:
        self.rank = 1
        self.me = SimpleNamespace(name="worker1")
        self.present = {1}
        self.lost = {0: "worker0 (rank 0) cannot be reached by RPC any more: killed."}
        self.vanished = {0}
        self.told: set[int] = set()
        self.is_idle = True
        self.sent = self.received = [0, 0]
        self.fabric = SimpleNamespace(loop=self)
        self.shutdown: Any = None

    def perform(self, work: Callable[[], None]) -> None:
        work()

    def start(self, coroutine: Any, ended: Callable[[Any], None], *, wake: bool) -> None:
        for _ in coroutine:
            pass
        ended(None)


@pytest.fixture
def shutdown() -> SessionShutdown:
    worker: Any = LastWorker()
    worker.shutdown = SessionShutdown(worker)
    return worker.shutdown


def test_the_loss_is_said_though_the_others_have_agreed(shutdown: SessionShutdown) -> None:
    shutdown.begin(WORK)
    with pytest.raises(WorkerLostError, match=r"worker0 \(rank 0\)"):
        shutdown.wait(0)


def test_the_next_call_goes_on_from_there(shutdown: SessionShutdown) -> None:
    shutdown.begin(WORK)
    with pytest.raises(WorkerLostError):
        shutdown.wait(0)
    shutdown.begin(WORK)
    assert shutdown.wait(0)
