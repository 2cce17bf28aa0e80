"""The loop: who drives, what it does with errors; work items run beside it, so many at a time. One process, no MPI."""

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.loops import counting, own_bell, own_loop, until

from hvlike.errors import ShutdownError, StateError
from hvlike.transport.loop import loop as loops
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.loop.thread_pool import Listen, ThreadPool


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = own_loop()
    yield made
    made.close()


@pytest.mark.parametrize("wait", list(Wait))
def test_a_waiting_thread_drives_coroutines_to_their_result(loop: Loop, wait: Wait) -> None:
    steps: list[int] = []
    task = loop.start(counting(3, wait, steps), wake=False)
    # A coroutine that waits for the bell is looked at again at every turn; somebody has to cause one.
    ringer = threading.Timer(0.05, loop.post, [lambda: None])
    ringer.start()
    assert loop.wait(lambda: task.done, 5.0)
    ringer.join()
    assert task.result == len(steps) == 3


def test_errors_end_their_coroutine_only(loop: Loop) -> None:
    def failing() -> Coroutine[None]:
        yield Wait.AGAIN
        raise ValueError("wrong")

    bad = loop.start(failing(), wake=False)
    good = loop.start(counting(5, Wait.AGAIN, []), wake=False)
    assert loop.wait(lambda: bad.done and good.done, 5.0)
    assert isinstance(bad.error, ValueError)
    assert good.result == 5


def test_a_coroutine_that_is_cancelled_before_its_first_step_is_gone(loop: Loop) -> None:
    """It stayed in the list as one that is always done, and the loop turned without ever looking for messages."""
    steps: list[int] = []
    turns: list[bool] = []

    def source(rung: bool) -> Wait:
        turns.append(rung)
        return Wait.NOTIFY

    loop.add_source(source, lambda: False)

    def start_and_cancel() -> None:
        loop.cancel(loop.start(counting(3, Wait.NOTIFY, steps)), ShutdownError("cancelled"))

    loop.post(start_and_cancel)
    loop.wait(lambda: bool(turns))
    turns.clear()
    # Nothing is left to do: it sleeps, and does not turn thousands of times.
    assert not loop.wait(lambda: len(turns) > 1000, 0.1)
    assert steps == []


def test_waiting_from_inside_the_loop_is_refused(loop: Loop) -> None:
    caught: list[RuntimeError] = []

    def action() -> None:
        try:
            loop.wait(lambda: False)
        except RuntimeError as error:
            caught.append(error)

    loop.post(action)
    assert loop.wait(lambda: bool(caught), 5.0)
    assert "from inside its own progress loop" in str(caught[0])


def test_closing_fails_what_still_runs() -> None:
    loop = own_loop()

    def endless() -> Coroutine[None]:
        while True:
            yield Wait.NOTIFY

    task = loop.start(endless())
    loop.close()
    assert isinstance(task.error, ShutdownError)


def test_the_health_check_runs_also_when_nothing_happens() -> None:
    ticks: list[float] = []
    loop = own_loop(tick=lambda: ticks.append(time.monotonic()))
    assert until(lambda: len(ticks) >= 2)
    loop.close()


def test_a_thread_that_does_not_drive_may_not_advance_a_coroutine(loop: Loop) -> None:
    gate: list[bool] = []

    def gated() -> Coroutine[None]:
        while not gate:
            yield Wait.NOTIFY

    task = loop.start(gated(), wake=False)
    loop.turn()
    with pytest.raises(StateError, match="does not drive the progress loop"):
        loop.cancel(task, ValueError("never seen"))
    with pytest.raises(StateError, match="only the driver may advance a coroutine"):
        loop.begin(counting(1, Wait.AGAIN, []))
    gate.append(True)
    assert loop.wait(lambda: task.done, 5.0)
    assert task.error is None


def test_a_second_driver_of_a_coroutine_is_an_error_and_no_corrupted_protocol(loop: Loop) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stolen() -> Coroutine[None]:
        inside.set()
        leave.wait(30.0)
        yield Wait.NOTIFY

    coroutine = stolen()
    thief = threading.Thread(target=lambda: next(coroutine))
    thief.start()
    assert inside.wait(30.0)
    task = loop.start(coroutine, wake=False)
    assert loop.wait(lambda: task.done, 5.0)
    leave.set()
    thief.join()
    assert isinstance(task.error, StateError)
    assert "two threads advance the coroutine" in str(task.error)


def test_a_task_that_the_loop_starts_begins_in_the_same_turn(loop: Loop) -> None:
    steps: list[int] = []
    loop.post(lambda: loop.start(counting(1, Wait.AGAIN, steps)), wake=False)
    loop.turn()
    assert len(steps) == 1


class Gauge:
    """Counts how many of its visitors are inside at a time."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.inside = 0
        self.most = 0
        self.left = 0
        self._lock = threading.Lock()

    def visit(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.gate.wait(60.0)
        with self._lock:
            self.inside -= 1
            self.left += 1


class SlowPool(ThreadPool):
    """Its maker comes late to what follows: other threads run first."""

    def __init__(self, listen: Listen, summon: Callable[[], None]) -> None:
        super().__init__(listen, summon)
        time.sleep(0.1)


def test_a_peer_may_ring_before_the_loop_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "ThreadPool", SlowPool)
    bell = own_bell()
    bell.ring()
    loop = own_loop(bell)
    ran = threading.Event()
    loop.post(ran.set)
    assert ran.wait(5.0)
    loop.close()


@pytest.mark.parametrize("limit", [1, 3, 16])
def test_limited_work_items_run_at_most_so_many_at_a_time(loop: Loop, limit: int) -> None:
    loop.thread_pool.allow(limit)
    gauge = Gauge()
    for _ in range(3 * limit):
        loop.thread_pool.submit(gauge.visit, limited=True)
    assert until(lambda: gauge.inside == limit)
    time.sleep(0.02)
    assert (gauge.inside, loop.thread_pool.running, loop.thread_pool.queued) == (limit, limit, 2 * limit)
    gauge.gate.set()
    assert until(lambda: gauge.left == 3 * limit)
    assert gauge.most == limit


def test_other_work_items_run_and_messages_move_while_all_limited_ones_block(loop: Loop) -> None:
    loop.thread_pool.allow(2)
    gauge = Gauge()
    for _ in range(5):
        loop.thread_pool.submit(gauge.visit, limited=True)
    assert until(lambda: gauge.inside == 2)
    ran = threading.Event()
    blocked = threading.Event()
    loop.thread_pool.submit(lambda: blocked.wait(60.0) and None)
    loop.thread_pool.submit(ran.set)
    assert ran.wait(30.0)
    moved = threading.Event()
    loop.post(moved.set)
    assert moved.wait(30.0)
    blocked.set()
    gauge.gate.set()
    assert until(lambda: gauge.left == 5)


def test_work_items_that_the_loop_submits_run_outside_of_it(loop: Loop) -> None:
    loop.thread_pool.allow(1)
    results: list[bool] = []
    # A wait inside the loop would be refused.
    loop.post(lambda: loop.thread_pool.submit(lambda: results.append(loop.wait(lambda: True)), limited=True))
    assert until(lambda: results == [True])


def test_threads_that_are_no_longer_needed_end(loop: Loop) -> None:
    loop.thread_pool.allow(16)
    gauge = Gauge()
    for _ in range(16):
        loop.thread_pool.submit(gauge.visit, limited=True)
    assert until(lambda: gauge.inside == 16)
    loop.thread_pool.allow(0)
    gauge.gate.set()
    assert until(lambda: loop.thread_pool.size == 1)


def test_closing_does_not_wait_for_a_work_item() -> None:
    loop = own_loop()
    gauge = Gauge()
    loop.thread_pool.submit(gauge.visit)
    assert until(lambda: gauge.inside == 1)
    loop.close()
    assert gauge.inside == 1
    gauge.gate.set()
    assert until(lambda: gauge.left == 1 and loop.thread_pool.size == 0)


def test_what_is_due_is_done_in_time_though_nobody_waits(loop: Loop) -> None:
    done: list[float] = []
    rang = threading.Event()

    def on_due(now: float) -> float:
        done.append(now)
        rang.set()
        return float("inf")

    loop.watch_clock(on_due)
    when = time.monotonic() + 0.05
    loop.perform(lambda: loop.due_at(when))
    assert rang.wait(30.0)
    assert done[0] >= when
    assert len(done) == 1


def test_a_time_limit_is_kept_while_the_thread_that_watched_it_runs_a_work_item() -> None:
    # No thread wakes by itself: only one that knows of the limit.
    loop = own_loop(spin=SpinPolicy(crowded=False, checks=10, tick_seconds=60.0))
    loop.thread_pool.allow(3)
    gauge = Gauge()
    for _ in range(3):
        loop.thread_pool.submit(gauge.visit, limited=True)
    gauge.gate.set()
    assert until(lambda: gauge.left == 3)
    over = threading.Event()

    def on_due(now: float) -> float:
        over.set()
        return math.inf

    loop.watch_clock(on_due)
    waited: list[bool] = []

    def begin() -> None:
        loop.due_at(time.monotonic() + 0.1)
        loop.thread_pool.submit(lambda: waited.append(over.wait(20.0)))

    loop.post(begin)
    assert until(lambda: bool(waited))
    assert waited == [True]
    loop.close()
