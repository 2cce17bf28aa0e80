"""The loop: who drives, what wakes it, what it does with errors. One process, no MPI."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from hvlike.errors import ShutdownError, StateError
from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence


class Bench:
    """A loop of its own with its doorbell."""

    def __init__(self) -> None:
        self.bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
        self.bell.initialise(os.getpid())
        self.ticks = 0
        self.loop = Loop(self.bell, spin=SpinPolicy(crowded=False, checks=10), sockets=None, tick=self.tick)

    def tick(self) -> None:
        self.ticks += 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


def counting(limit: int, wait: Wait, steps: list[int]) -> Coroutine[str]:
    for number in range(limit):
        steps.append(number)
        yield wait
    return "done"


@pytest.mark.parametrize("wait", list(Wait))
def test_a_waiting_thread_drives_coroutines_to_their_result(bench: Bench, wait: Wait) -> None:
    steps: list[int] = []
    task = bench.loop.start(counting(3, wait, steps), wake=False)
    # A coroutine that waits for the bell is looked at again at every turn; somebody has to cause one.
    ringer = threading.Timer(0.05, bench.bell.ring)
    ringer.start()
    assert bench.loop.wait(lambda: task.done, 5.0)
    ringer.join()
    assert task.result == "done"
    assert steps == [0, 1, 2]


def test_the_background_thread_drives_when_nobody_waits(bench: Bench) -> None:
    finished = threading.Event()
    bench.loop.start(counting(3, Wait.AGAIN, []), lambda task: finished.set())
    assert finished.wait(5.0)


def test_errors_end_their_coroutine_only(bench: Bench) -> None:
    def failing() -> Coroutine[None]:
        yield Wait.AGAIN
        raise ValueError("wrong")

    bad = bench.loop.start(failing(), wake=False)
    good = bench.loop.start(counting(5, Wait.AGAIN, []), wake=False)
    assert bench.loop.wait(lambda: bad.done and good.done, 5.0)
    assert isinstance(bad.error, ValueError)
    assert good.result == "done"


def test_a_coroutine_that_is_cancelled_before_its_first_step_is_gone(bench: Bench) -> None:
    """It stayed in the list as one that is always done, and the loop turned without ever looking for messages."""
    steps: list[int] = []
    turns: list[bool] = []

    def source(rung: bool) -> Wait:
        turns.append(rung)
        return Wait.NOTIFY

    bench.loop.add_source(source, lambda: False)

    def start_and_cancel() -> None:
        bench.loop.cancel(bench.loop.start(counting(3, Wait.NOTIFY, steps)), ShutdownError("cancelled"))

    bench.loop.post(start_and_cancel)
    bench.loop.wait(lambda: bool(turns))
    turns.clear()
    # Nothing is left to do: it sleeps, and does not turn thousands of times.
    assert not bench.loop.wait(lambda: len(turns) > 1000, 0.1)
    assert steps == []


def test_a_wait_with_a_limit_ends_in_time_and_leaves_the_coroutine_running(bench: Bench) -> None:
    gate: list[bool] = []

    def gated() -> Coroutine[str]:
        while not gate:
            yield Wait.NOTIFY
        return "passed"

    task = bench.loop.start(gated(), wake=False)
    assert not bench.loop.wait(lambda: task.done, 0.1)
    gate.append(True)
    bench.bell.ring()
    assert bench.loop.wait(lambda: task.done, 5.0)
    assert task.result == "passed"


def test_many_threads_may_wait_at_once(bench: Bench) -> None:
    results: list[bool] = []

    def gated(release: threading.Event) -> Coroutine[None]:
        while not release.is_set():
            yield Wait.NOTIFY

    releases = [threading.Event() for _ in range(8)]
    tasks = [bench.loop.start(gated(release)) for release in releases]
    threads = [
        threading.Thread(target=lambda task=task: results.append(bench.loop.wait(lambda: task.done, 10.0)))
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    for release in reversed(releases):
        release.set()
        bench.bell.ring()
    for thread in threads:
        thread.join(10.0)
    assert results == [True] * 8


def test_actions_posted_from_any_thread_run_in_the_loop_in_order(bench: Bench) -> None:
    seen: list[int] = []
    for number in range(50):
        bench.loop.post(lambda number=number: seen.append(number))
    assert bench.loop.wait(lambda: len(seen) == 50, 5.0)
    assert seen == list(range(50))


def test_waiting_from_inside_the_loop_is_refused(bench: Bench) -> None:
    caught: list[RuntimeError] = []

    def action() -> None:
        try:
            bench.loop.wait(lambda: False)
        except RuntimeError as error:
            caught.append(error)

    bench.loop.post(action)
    assert bench.loop.wait(lambda: bool(caught), 5.0)
    assert "from inside its own progress loop" in str(caught[0])


def test_closing_fails_what_still_runs() -> None:
    bench = Bench()

    def endless() -> Coroutine[None]:
        while True:
            yield Wait.NOTIFY

    task = bench.loop.start(endless())
    bench.loop.close()
    assert isinstance(task.error, ShutdownError)


def test_the_health_check_runs_also_when_nothing_happens(bench: Bench) -> None:
    end = time.monotonic() + 30
    while bench.ticks < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert bench.ticks >= 2


def test_an_idle_loop_uses_no_core(bench: Bench) -> None:
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05


def test_a_thread_that_does_not_drive_may_not_advance_a_coroutine(bench: Bench) -> None:
    gate: list[bool] = []

    def gated() -> Coroutine[None]:
        while not gate:
            yield Wait.NOTIFY

    task = bench.loop.start(gated(), wake=False)
    bench.loop.turn()
    with pytest.raises(StateError, match="does not drive the progress loop"):
        bench.loop.cancel(task, ValueError("never seen"))
    with pytest.raises(StateError, match="only the driver may advance a coroutine"):
        bench.loop.begin(counting(1, Wait.AGAIN, []))
    gate.append(True)
    assert bench.loop.wait(lambda: task.done, 5.0)
    assert task.error is None


def test_a_second_driver_of_a_coroutine_is_an_error_and_no_corrupted_protocol(bench: Bench) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stolen() -> Coroutine[None]:
        inside.set()
        leave.wait(30.0)
        yield Wait.NOTIFY

    coroutine = stolen()
    thief = threading.Thread(target=lambda: next(coroutine))
    thief.start()
    assert inside.wait(30.0)
    task = bench.loop.start(coroutine, wake=False)
    assert bench.loop.wait(lambda: task.done, 5.0)
    leave.set()
    thief.join()
    assert isinstance(task.error, StateError)
    assert "two threads advance the coroutine" in str(task.error)


def test_a_task_that_the_loop_starts_begins_in_the_same_turn(bench: Bench) -> None:
    steps: list[int] = []
    bench.loop.post(lambda: bench.loop.start(counting(1, Wait.AGAIN, steps)), wake=False)
    bench.loop.turn()
    assert steps == [0]
