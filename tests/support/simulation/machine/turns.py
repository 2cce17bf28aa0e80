"""A simple scheduler for tests of the simulated MPI, and a job that runs on it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from support.simulation.machine.simulated_mpi import SimulatedMpi

LARGE = 10_000
"""Bytes of a message that is not buffered."""

ONE_NODE, TWO_NODES = [[0, 1, 2]], [[0, 1], [2]]

Program = Callable[[Any], object]
"""What a rank does, given its module of MPI."""


class Stopped(BaseException):
    """The job is over: its threads end."""


class Turns:
    """The scheduler of these tests: a thread for each program, of which one runs. Who goes on is drawn."""

    def __init__(self, ranks: Sequence[int], seed: int) -> None:
        """ranks: of each thread."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.dead: set[int] = set()
        """Ranks whose threads do not run any more."""
        self.errors: list[BaseException] = []
        self._ranks = ranks
        self._current = 0
        self._waiting: list[tuple[Callable[[], bool], float | None, str]] = [
            (lambda: True, None, "start") for _ in ranks
        ]
        self._ended: set[int] = set()
        self._turns = [threading.Semaphore(0) for _ in ranks]
        self._over = threading.Semaphore(0)
        self._stops = False

    @property
    def rank(self) -> int:
        return self._ranks[self._current]

    def switch(self, what: str) -> None:
        self.block(lambda: True, None, what)

    def change(self) -> None:
        """Nothing: nobody rests."""

    def touch(self, key: object) -> None:
        """Nothing: all conditions are looked at each time."""

    def block(self, ready: Callable[[], bool], until: float | None, what: str, key: object = None) -> bool:
        me = self._current
        self._waiting[me] = ready, until, what
        self._pass_on()
        self._turns[me].acquire()
        if self._stops:
            raise Stopped
        return ready()

    def run(self, programs: Sequence[Callable[[], object]]) -> None:
        """Run a program in each thread; raises the first of their errors, or AssertionError where all wait."""
        threads = [threading.Thread(target=self._live, args=each, daemon=True) for each in enumerate(programs)]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.acquire()
        self._stops = True
        for thread, turn in zip(threads, self._turns, strict=True):
            turn.release()
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _live(self, me: int, program: Callable[[], object]) -> None:
        self._turns[me].acquire()
        try:
            if not self._stops:
                program()
        except Stopped:
            return
        except BaseException as error:
            self.errors.append(error)
        self._ended.add(me)
        if not self._stops:
            self._pass_on()

    def _pass_on(self) -> None:
        self.now += self.random.uniform(0.0, 1e-6)
        waiting = [each for each, rank in enumerate(self._ranks) if each not in self._ended and rank not in self.dead]
        while waiting and not self.errors:
            able = [
                each
                for each in waiting
                if self._waiting[each][0]() or (self._waiting[each][1] or self.now + 1) <= self.now
            ]
            if able:
                self._current = self.random.choice(able)
                self._turns[self._current].release()
                return
            times = [until for _, until, _ in (self._waiting[each] for each in waiting) if until is not None]
            if times:
                self.now = min(times)
                continue
            texts = ", ".join(f"rank {self._ranks[each]} in {self._waiting[each][2]}" for each in waiting)
            self.errors.append(AssertionError(f"all wait: {texts}"))
        self._over.release()


def run(
    nodes: Sequence[Sequence[int]], *programs: Program, seed: int = 0, prepare: Callable[[SimulatedMpi], object] = bool
) -> SimulatedMpi:
    """Run a job: one program for each rank, or the same for all."""
    ranks = list(range(sum(map(len, nodes))))
    scheduler = Turns(ranks, seed)
    job = SimulatedMpi(scheduler, nodes)
    prepare(job)
    each = programs if len(programs) > 1 else programs * len(ranks)
    scheduler.run([partial(each[rank], job.module(rank)) for rank in ranks])
    return job


def poll(*requests: Any) -> None:
    for request in requests:
        while not request.Test():
            pass


def numbers(count: int, start: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(count) + start).astype(np.uint8)
