"""An op queue on a loop of its own: what the submitting thread drives itself, and what it leaves to the loop."""

import math
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.backends.base import SoloBackend
from hvlike.backends.op_queue import OpQueue
from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.coroutine import Coroutine, Task, Wait
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence


class Bench:
    """A queue of a backend that calls MPI, so that only the driver of the loop advances its jobs."""

    def __init__(self) -> None:
        bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
        bell.initialise(os.getpid())
        self.spin = SpinPolicy(crowded=False)
        self.loop = Loop(bell, spin=self.spin, sockets=None, tick=lambda: None)
        fabric: Any = SimpleNamespace(loop=self.loop, recorder=None, counters=None, spin=self.spin)
        group: Any = SimpleNamespace(number=0)
        self.queue = OpQueue(fabric, group, -1, SoloBackend())
        self.ended: list[Task[None]] = []

    def drive(self, coroutine: Coroutine[None], patience: float) -> bool:
        """patience: how many seconds a job that does not move stays with this thread."""
        self.spin.queue_seconds = self.spin.network_seconds = patience
        return self.queue.drive(coroutine, self.ended.append)

    def end(self) -> Task[None]:
        """Wait for the end of the job that was left to the loop."""
        assert self.loop.wait(lambda: bool(self.ended), 30.0)
        return self.ended[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


def counted(steps: int, wait: Wait, taken: list[int]) -> Coroutine[None]:
    for _ in range(steps):
        taken.append(threading.get_ident())
        yield wait


def test_what_moves_is_done_by_the_caller(bench: Bench) -> None:
    taken: list[int] = []
    assert bench.drive(counted(1000, Wait.AGAIN, taken), 0.0)
    assert taken == [threading.get_ident()] * 1000
    assert bench.queue.idle
    assert not bench.ended


def test_what_has_to_wait_goes_on_in_the_loop(bench: Bench) -> None:
    arrived, taken = threading.Event(), []

    def waiting() -> Coroutine[None]:
        while not arrived.is_set():
            taken.append(time.monotonic())
            yield Wait.POLL

    assert not bench.drive(waiting(), 1e-3)
    before = len(taken)
    timer = threading.Timer(0.05, arrived.set)
    timer.start()
    assert bench.end().error is None
    timer.join()
    assert len(taken) > before
    assert bench.queue.idle


def test_an_error_is_the_callers_while_it_drives_and_the_tasks_after_that(bench: Bench) -> None:
    def failing(still: int) -> Coroutine[None]:
        yield from counted(still, Wait.POLL, [])
        raise KeyError("expected")

    with pytest.raises(KeyError, match="expected"):
        bench.drive(failing(3), math.inf)
    assert not bench.ended
    assert not bench.drive(failing(1000), 0.0)
    assert isinstance(bench.end().error, KeyError)


def test_another_thread_that_drives_the_loop_does_it(bench: Bench) -> None:
    begun, leave = threading.Event(), threading.Event()

    def busy() -> Coroutine[None]:
        while not leave.is_set():
            begun.set()
            yield Wait.POLL

    bench.loop.start(busy())
    assert begun.wait(30.0)
    taken: list[int] = []
    assert not bench.drive(counted(1, Wait.AGAIN, taken), math.inf)
    leave.set()
    assert bench.end().error is None
    assert len(taken) == 1
