"""An op queue on a loop of its own: what the caller drives, and what it leaves to the loop; how operations end."""

import inspect
import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.loops import counting, own_loop

from hvlike.backends.base import SoloBackend
from hvlike.backends.op_queue import OpQueue
from hvlike.backends.operation import Operation, OperationState
from hvlike.backends.waves import side_by_side
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.spin import SpinPolicy


class Bench:
    """A queue of a backend that calls MPI, so that only the driver of the loop advances its jobs."""

    def __init__(self) -> None:
        self.spin = SpinPolicy(crowded=False)
        self.loop = own_loop(spin=self.spin)
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


def test_what_moves_is_done_by_the_caller(bench: Bench) -> None:
    taken: list[int] = []
    operation = bench.run(counting(1000, Wait.AGAIN, taken))
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
        yield from counting(1000, Wait.POLL, [])
        raise KeyError("expected")

    first = bench.run(failing(), patience)
    assert first.done() == (patience > 0)
    later = [bench.run(counting(1, Wait.POLL, []), drive=drive) for drive in (False, True)]
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


def test_what_is_given_while_a_thread_drives_begins_when_that_has_ended(bench: Bench) -> None:
    second = Operation()

    def first() -> Coroutine[None]:
        bench.queue.run(lambda backend: counting(1, Wait.AGAIN, []), second)
        yield Wait.AGAIN

    assert bench.run(first()).done()
    assert bench.loop.wait(second.done, 10)


def test_an_interrupt_is_raised_where_it_came(bench: Bench) -> None:
    def interrupted() -> Coroutine[None]:
        yield Wait.AGAIN
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(interrupted())
    with pytest.raises(KeyboardInterrupt):
        bench.run(counting(1, Wait.AGAIN, [])).wait(30.0)


def given(bench: Bench, order: list[str], name: str, *, hold: bool = True) -> Operation:
    """Give the queue a job that notes which thread has run it."""

    def job() -> Coroutine[None]:
        order.append(f"{name} in {'this' if threading.get_ident() == here else 'another'} thread")
        yield Wait.AGAIN

    here = threading.get_ident()
    bench.spin.queue_seconds = bench.spin.network_seconds = math.inf
    operation = Operation()
    bench.queue.give(lambda backend: job(), operation, hold=hold)
    return operation


def test_what_is_held_waits_for_a_thread_that_drives_it(bench: Bench) -> None:
    order: list[str] = []
    held = [given(bench, order, name) for name in "ab"]
    bench.loop.start(counting(1, Wait.POLL, []))
    time.sleep(0.05)
    assert order == []
    assert not bench.queue.idle
    assert bench.queue.wait(held[1], 30.0)
    assert order == ["a in this thread", "b in this thread"]
    assert [each.done() for each in held] == [True, True]


def test_what_is_held_goes_with_what_the_loop_is_given(bench: Bench) -> None:
    order: list[str] = []
    held = given(bench, order, "a")
    for_loop = given(bench, order, "b", hold=False)
    bench.queue.start(drive=True, wake=True)
    while not for_loop.done():
        time.sleep(0.001)
    assert held.done()
    assert order == ["a in another thread", "b in another thread"]


def test_the_loop_leaves_alone_what_is_held_while_it_has_a_job(bench: Bench) -> None:
    order: list[str] = []
    arrived = threading.Event()

    def waiting() -> Coroutine[None]:
        while not arrived.is_set():
            yield Wait.POLL

    first = bench.run(waiting())
    held = given(bench, order, "a")
    arrived.set()
    assert first.wait(30.0)
    assert order == []
    # As the watchdog does.
    bench.queue.flush()
    assert bench.queue.wait(held, 30.0)
    assert len(order) == 1


def test_held_jobs_end_with_their_queue(bench: Bench) -> None:
    order: list[str] = []
    held = given(bench, order, "a")
    bench.loop.perform(lambda: bench.queue.fail(KeyError("expected")))
    assert bench.queue.wait(held, 30.0)
    assert isinstance(held.error, KeyError)
    assert order == []


def test_an_error_ends_what_is_held_behind_it(bench: Bench) -> None:
    def failing() -> Coroutine[None]:
        yield Wait.AGAIN
        raise KeyError("expected")

    order: list[str] = []
    failed = Operation()
    bench.queue.give(lambda backend: failing(), failed, hold=True)
    held = given(bench, order, "a")
    assert bench.queue.wait(held, 30.0)
    assert isinstance(failed.error, KeyError)
    assert isinstance(held.error, KeyError)
    assert order == []


def test_what_a_callback_starts_is_not_driven_within_it(bench: Bench) -> None:
    """Else a chain of calls would need a frame for each."""
    depths: list[int] = []

    def call() -> None:
        operation = Operation()
        operation.then(again)
        bench.queue.give(lambda backend: counting(1, Wait.AGAIN, []), operation, hold=True)
        bench.queue.start(drive=True, wake=True)

    def again(operation: Operation) -> None:
        depths.append(len(inspect.stack(0)))
        if len(depths) < 20:
            call()

    bench.spin.queue_seconds = bench.spin.network_seconds = math.inf
    call()
    assert bench.loop.wait(lambda: len(depths) == 20, 30.0)
    assert max(depths) < min(depths) + 20


def test_a_callback_may_wait_for_what_is_held_behind_its_own(bench: Bench) -> None:
    order: list[str] = []
    first = given(bench, order, "a")
    second = given(bench, order, "b")
    first.then(lambda operation: order.append(f"waited: {bench.queue.wait(second, 30.0)}"))
    bench.queue.start(drive=True)
    assert [each[:6] for each in order] == ["a in t", "b in t", "waited"]


def test_the_first_end_counts() -> None:
    operation = Operation()
    operation.value = 7
    operation.end()
    operation.end(KeyError("late"))
    assert operation.state is OperationState.DONE
    assert operation.result() == 7


def test_what_has_failed_raises_for_everybody_who_waits() -> None:
    operation = Operation()
    operation.begin()
    assert operation.state is OperationState.RUNNING
    operation.end(KeyError("expected"))
    for _ in range(2):
        with pytest.raises(KeyError, match="expected"):
            operation.result()


def test_the_fence_is_called_by_each_who_waits() -> None:
    calls: list[int] = []
    operation = Operation()
    operation.fence = lambda: calls.append(threading.get_ident())
    operation.end()
    operation.wait()
    operation.result()
    assert len(calls) == 2


def test_callbacks_come_once_before_and_after_the_end() -> None:
    heard: list[str] = []
    operation = Operation()
    operation.then(lambda each: heard.append(f"before {each.state.value}"))
    assert not heard
    operation.end()
    operation.then(lambda each: heard.append(f"after {each.state.value}"))
    assert heard == ["before done", "after done"]


def test_callbacks_that_meet_the_end_come_once() -> None:
    heard: list[int] = []
    for turn in range(200):
        operation = Operation()
        thread = threading.Thread(target=operation.end)
        thread.start()
        for number in range(10):
            operation.then(lambda _, number=10 * turn + number: heard.append(number))
        thread.join()
    assert sorted(heard) == list(range(2000))


def test_what_nobody_ends_does_not_block_without_a_waiter() -> None:
    operation = Operation()
    assert not operation.wait(0.0)
    with pytest.raises(TimeoutError, match=r"Operation\(\d+, waiting\) has not ended within 0.0 s"):
        operation.result(0.0)


def waiting(waits: list[Wait], log: list[str], name: str) -> Coroutine[None]:
    try:
        for wait in waits:
            log.append(name)
            yield wait
    finally:
        log.append(f"end of {name}")


def test_each_advances_once_in_a_turn() -> None:
    log: list[str] = []
    both = side_by_side([waiting([Wait.NOTIFY] * 3, log, "a"), waiting([Wait.NOTIFY] * 1, log, "b")])
    next(both)
    assert log == ["a", "b"]
    next(both)
    assert log == ["a", "b", "a", "end of b"]


def test_the_most_urgent_wait_counts() -> None:
    bell, poll, again = [Wait.NOTIFY] * 2, [Wait.POLL] * 2, [Wait.AGAIN] * 2
    for together, wait in (([bell, bell], Wait.NOTIFY), ([poll, bell], Wait.POLL), ([bell, again, poll], Wait.AGAIN)):
        assert next(side_by_side([waiting(each, [], "") for each in together])) is wait


def test_what_has_ended_may_have_freed_another() -> None:
    both = side_by_side([waiting([Wait.NOTIFY] * 3, [], "a"), waiting([], [], "b")])
    assert next(both) is Wait.AGAIN
    assert next(both) is Wait.NOTIFY


def test_it_ends_with_the_last() -> None:
    log: list[str] = []
    assert len(list(side_by_side([waiting([Wait.POLL] * count, log, "x") for count in (1, 4, 2)]))) == 4
    assert log.count("end of x") == 3
    assert list(side_by_side([])) == []


@pytest.mark.parametrize("how", ["an error", "giving up"])
def test_an_end_closes_the_others(how: str) -> None:
    def failing() -> Coroutine[None]:
        yield Wait.NOTIFY
        raise OSError("broken")

    log: list[str] = []
    both = side_by_side([waiting([Wait.NOTIFY] * 9, log, "a"), failing(), waiting([Wait.NOTIFY] * 9, log, "b")])
    next(both)
    if how == "giving up":
        both.close()
    else:
        with pytest.raises(OSError, match="broken"):
            next(both)
    assert {"end of a", "end of b"} <= set(log)
