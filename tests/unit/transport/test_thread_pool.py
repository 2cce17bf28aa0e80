"""The background threads: work items run beside the loop, a limited number at a time, and somebody always listens."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop import loop as loops
from hvlike.transport.loop.loop import Loop
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.loop.thread_pool import Listen, ThreadPool
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence


def make_loop(**policy: float) -> Loop:
    bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
    bell.initialise(os.getpid())
    return Loop(bell, spin=SpinPolicy(crowded=False, checks=10, **policy), sockets=None, tick=lambda: None)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = make_loop()
    yield made
    made.close()


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


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


class SlowPool(ThreadPool):
    """Its maker comes late to what follows: other threads run first."""

    def __init__(self, listen: Listen, summon: Callable[[], None]) -> None:
        super().__init__(listen, summon)
        time.sleep(0.1)


def test_a_peer_may_ring_before_the_loop_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "ThreadPool", SlowPool)
    bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
    bell.initialise(os.getpid())
    bell.ring()
    loop = Loop(bell, spin=SpinPolicy(crowded=False, checks=10), sockets=None, tick=lambda: None)
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


def test_a_waiting_thread_leaves_work_items_to_the_others(loop: Loop) -> None:
    loop.thread_pool.allow(1)
    threads: list[threading.Thread] = []
    loop.post(lambda: loop.thread_pool.submit(lambda: threads.append(threading.current_thread())), wake=False)
    assert loop.wait(lambda: bool(threads), 30.0)
    assert threads[0] is not threading.current_thread()


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
    loop = make_loop()
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


def test_performed_actions_come_after_those_posted_before(loop: Loop) -> None:
    seen: list[int] = []
    loop.post(lambda: seen.append(1), wake=False)
    loop.perform(lambda: seen.append(2))
    assert until(lambda: len(seen) == 2)
    assert seen == [1, 2]


def test_a_time_limit_is_kept_while_the_thread_that_watched_it_runs_a_work_item() -> None:
    # No thread wakes by itself: only one that knows of the limit.
    loop = make_loop(tick_seconds=60.0)
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
