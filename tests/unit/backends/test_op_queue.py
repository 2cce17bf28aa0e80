"""An op queue on a loop of its own: what the calling thread drives itself, and what it leaves to the loop."""

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
from hvlike.backends.operation import Operation, OperationState
from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.coroutine import Coroutine, Wait
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
        recorder = SimpleNamespace(on=False)
        epoch = SimpleNamespace(advance=lambda: None)
        fabric: Any = SimpleNamespace(
            loop=self.loop, recorder=recorder, counters=None, spin=self.spin, plan_epoch=epoch
        )
        group: Any = SimpleNamespace(number=0)
        self.queue = OpQueue(fabric, group, -1, SoloBackend())
        self.queue.drives = True

    def run(self, coroutine: Coroutine[Any], patience: float = 0.0, *, drive: bool = True) -> Operation:
        """patience: how many seconds a job that does not move stays with this thread."""
        self.spin.queue_seconds = self.spin.network_seconds = patience
        operation = self.queue.run(lambda backend: coroutine, drive=drive)
        operation.waiter = self.loop.wait
        return operation


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


def counted(steps: int, wait: Wait, taken: list[int]) -> Coroutine[int]:
    for _ in range(steps):
        taken.append(threading.get_ident())
        yield wait
    return steps


def test_what_moves_is_done_by_the_caller(bench: Bench) -> None:
    taken: list[int] = []
    operation = bench.run(counted(1000, Wait.AGAIN, taken))
    assert operation.done()
    assert operation.result() == 1000
    assert taken == [threading.get_ident()] * 1000
    assert bench.queue.idle


def test_what_has_to_wait_goes_on_in_the_loop(bench: Bench) -> None:
    arrived, taken = threading.Event(), []

    def waiting() -> Coroutine[str]:
        while not arrived.is_set():
            taken.append(time.monotonic())
            yield Wait.POLL
        return "arrived"

    operation = bench.run(waiting(), 1e-3)
    assert operation.state is OperationState.RUNNING
    before = len(taken)
    timer = threading.Timer(0.05, arrived.set)
    timer.start()
    assert operation.result(30.0) == "arrived"
    timer.join()
    assert len(taken) > before
    assert bench.queue.idle


@pytest.mark.parametrize("patience", [math.inf, 0.0], ids=["driven", "left to the loop"])
def test_an_error_ends_the_operation_and_all_that_come_after(bench: Bench, patience: float) -> None:
    def failing() -> Coroutine[None]:
        yield from counted(1000, Wait.POLL, [])
        raise KeyError("expected")

    first = bench.run(failing(), patience)
    assert first.done() == (patience > 0)
    later = [bench.run(counted(1, Wait.POLL, []), drive=drive) for drive in (False, True)]
    for operation in (first, *later):
        with pytest.raises(KeyError, match="expected"):
            operation.wait(30.0)
        assert operation.state is OperationState.FAILED
    assert isinstance(bench.queue.broken, KeyError)


def test_what_a_thread_drives_ends_with_its_queue(bench: Bench) -> None:
    closed: list[bool] = []

    def waiting() -> Coroutine[None]:
        try:
            while True:
                # This thread drives the loop here, too: another rank is lost, say.
                bench.queue.fail(KeyError("expected"))
                yield Wait.POLL
        finally:
            closed.append(True)

    operation = bench.run(waiting())
    assert not operation.done()
    with pytest.raises(KeyError, match="expected"):
        operation.wait(30.0)
    assert closed


def test_an_interrupt_is_raised_where_it_came(bench: Bench) -> None:
    def interrupted() -> Coroutine[None]:
        yield Wait.AGAIN
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(interrupted())
    with pytest.raises(KeyboardInterrupt):
        bench.run(counted(1, Wait.AGAIN, [])).wait(30.0)


def test_jobs_keep_their_order_whoever_gives_them(bench: Bench) -> None:
    order: list[int] = []

    def job(number: int) -> Coroutine[None]:
        order.append(number)
        yield Wait.AGAIN
        if number == 1:
            # In the loop, while another one is before it.
            bench.run(job(3), drive=False)

    def first(arrived: threading.Event) -> Coroutine[None]:
        while not arrived.is_set():
            yield Wait.POLL

    arrived = threading.Event()
    bench.run(first(arrived), drive=False)
    bench.run(job(1), drive=False)
    last = bench.run(job(2))
    arrived.set()
    last.wait(30.0)
    assert bench.loop.wait(lambda: len(order) == 3, 30.0)
    assert order == [1, 2, 3]


def test_another_thread_that_drives_the_loop_does_it(bench: Bench) -> None:
    begun, leave = threading.Event(), threading.Event()

    def busy() -> Coroutine[None]:
        while not leave.is_set():
            begun.set()
            yield Wait.POLL

    bench.loop.start(busy())
    assert begun.wait(30.0)
    taken: list[int] = []
    operation = bench.run(counted(1, Wait.AGAIN, taken), math.inf)
    leave.set()
    assert operation.result(30.0) == 1
    assert len(taken) == 1
