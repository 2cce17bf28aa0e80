"""Doorbells: a ring is never lost, whoever drives."""

import os
import threading

from hvlike.system.mapped_memory import Segment
from hvlike.transport.memory.doorbell import BELL_BYTES, Doorbell, Fence


def make() -> Doorbell:
    bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence())
    bell.initialise(os.getpid())
    return bell


def test_a_ring_wakes_the_driver_if_there_is_one_and_the_background_thread_else() -> None:
    bell = make()
    bell.ring()
    assert not bell.rung()
    assert bell.sleep_idle(0.0)
    bell.enter()
    bell.ring()
    assert not bell.sleep_idle(0.0)
    assert bell.rung()


def test_a_driver_that_leaves_learns_of_a_ring_it_has_not_seen() -> None:
    bell = make()
    bell.enter()
    assert not bell.leave()
    bell.enter()
    bell.ring()
    assert bell.leave()


def test_a_nudge_costs_nothing_while_the_driver_is_awake_and_wakes_it_when_it_sleeps() -> None:
    bell = make()
    bell.enter()
    bell.notify_if_sleeping()
    assert not bell.rung()
    bell.prepare_sleep()
    bell.notify_if_sleeping()
    assert bell.sleep(1.0)
    bell.awake()


def test_no_ring_is_lost_while_drivers_come_and_go() -> None:
    bell = make()
    rings = 20_000
    heard = 0
    stop = threading.Event()

    def ringer() -> None:
        for _ in range(rings):
            bell.ring()
        stop.set()

    thread = threading.Thread(target=ringer)
    thread.start()
    while not stop.is_set():
        bell.enter()
        heard += bell.rung()
        heard += bell.leave()
    thread.join()
    heard += bell.rung()
    while bell.sleep_idle(0.0):
        heard += 1
    assert heard > 0
    # Nothing is left to hear, and the next ring is heard.
    bell.ring()
    assert bell.sleep_idle(0.0)
