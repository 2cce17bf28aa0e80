"""The end of a session is seen when, and only when, no worker does anything and no message is on its way.

Simulated: messages wait in one heap and are delivered in random order; work that is done may cause more work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.errors import WorkerLostError
from hvlike.rpc.agent.shutdown import REFERENCES, WORK, Report, SessionShutdown, Termination, totals
from hvlike.rpc.wire.message import IDLE_REPORT


class Network:
    """Everything that is to happen, in any order."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: list[Callable[[], None]] = []
        self.on_its_way = 0
        """Messages of calls that have not arrived."""
        self.workers = [SimulatedWorker(self, rank, size) for rank in range(size)]

    def run(self) -> None:
        for _ in range(100_000):
            if not self.events:
                return
            self.events.pop(self.random.randrange(len(self.events)))()
        raise AssertionError("it never ends")

    def is_over(self) -> bool:
        """Whether all have come to the end, and nothing is on its way."""
        there = [worker for worker in self.workers if not worker.gone]
        return not self.on_its_way and all(worker.begun and worker.is_idle for worker in there)


class SimulatedWorker:
    """A worker whose work is to wait and then to send what is left of it to others."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self.rank = rank
        self.present = set(range(size))
        self.gone = self.begun = self.ended = False
        self.sent = [0] * size
        self.received = [0] * size
        self._busy = 0
        self._network = network
        self.termination = Termination(self, self.tell, self.later)

    @property
    def is_idle(self) -> bool:
        return not self._busy

    def tell(self, rank: int, what: int, *rest: Any) -> None:
        if what == IDLE_REPORT:
            self._to(rank, lambda worker: worker.termination.hear_report(self.rank, *rest))
        else:
            self._to(rank, lambda worker: worker.termination.hear_result(*rest))

    def later(self, check: Callable[[], None], waves: int) -> None:
        assert waves < 1000
        self._network.events.append(check)

    def _to(self, rank: int, hear: Callable[[SimulatedWorker], None]) -> None:
        worker = self._network.workers[rank]
        self._network.events.append(lambda: None if worker.gone else hear(worker))

    def begin_shutdown(self) -> None:
        if not self.gone:
            self.begun = True
            self.termination.begin(WORK, self._end)

    def _end(self) -> None:
        assert self._network.is_over(), f"worker {self.rank} ended too early"
        self.ended = True

    def send_work(self, rank: int, hops: int) -> None:
        network = self._network
        self.sent[rank] += 1
        network.on_its_way += 1

        def arrive() -> None:
            network.on_its_way -= 1
            worker = network.workers[rank]
            if not worker.gone:
                worker.take_work(self.rank, hops)

        network.events.append(arrive)

    def take_work(self, source: int, hops: int) -> None:
        self.received[source] += 1
        self._busy += 1
        self._network.events.append(lambda: self._work(hops))

    def _work(self, hops: int) -> None:
        if self.gone:
            return
        if hops:
            for _ in range(self._network.random.choice((1, 1, 1, 2))):
                self.send_work(self._network.random.choice(sorted(self.present)), hops - 1)
        self._busy -= 1
        self.termination.check()

    def leave(self) -> None:
        """Without waiting for anybody; the others hear of it."""
        self.gone = True
        for worker in self._network.workers:
            self._network.events.append(lambda worker=worker: worker.hear_of_leaving(self.rank))

    def hear_of_leaving(self, rank: int) -> None:
        if not self.gone:
            self.present.discard(rank)
            self.termination.check()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_end_and_none_too_early(size: int) -> None:
    for seed in range(150):
        network = Network(size, seed)
        for worker in network.workers:
            worker.send_work(network.random.randrange(size), network.random.randrange(6))
            network.events.append(worker.begin_shutdown)
        network.run()
        assert all(worker.ended for worker in network.workers)


class PhasedWorker(SimulatedWorker):
    """Ends both phases. When another worker vanishes it pauses, begins again, and asks who has ended already."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        super().__init__(network, rank, size)
        self._asked_by: set[int] = set()

    def begin_shutdown(self) -> None:
        if not (self.gone or self.ended):
            self.termination.begin(WORK, lambda: self.termination.begin(REFERENCES, self._end))

    def _end(self) -> None:
        self.ended = True
        for rank in self._asked_by:
            self.say_that_it_left(rank)

    def say_that_it_left(self, rank: int) -> None:
        self._to(rank, lambda worker: worker.hear_of_leaving(self.rank))

    def tell(self, rank: int, what: int, *rest: Any) -> None:
        def hear(worker: Any) -> None:
            if not worker.ended and what == IDLE_REPORT:
                worker.termination.hear_report(self.rank, *rest)
            elif not worker.ended:
                worker.termination.hear_result(*rest)
            elif what == IDLE_REPORT:
                worker.say_that_it_left(self.rank)

        self._to(rank, hear)

    def hear_question(self, rank: int) -> None:
        if self.ended:
            self.say_that_it_left(rank)
        else:
            self._asked_by.add(rank)

    def hear_of_leaving(self, rank: int) -> None:
        if self.ended or rank not in self.present:
            return
        if self._network.workers[rank].gone:
            self.termination.pause()
            self._network.events.append(self.begin_shutdown)
        super().hear_of_leaving(rank)
        for other in self.present - {self.rank}:
            self._to(other, lambda worker: worker.hear_question(self.rank))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_survivors_end_when_one_vanishes_at_any_moment(size: int) -> None:
    for seed in range(200):
        network = Network(size, seed)
        network.workers = [PhasedWorker(network, rank, size) for rank in range(size)]
        network.events += [worker.begin_shutdown for worker in network.workers]
        lost = network.random.choice(network.workers)
        for _ in range(network.random.randrange(12 * size)):
            if network.events:
                network.events.pop(network.random.randrange(len(network.events)))()
        lost.leave()
        network.run()
        assert all(worker.ended for worker in network.workers if worker is not lost), seed


def test_workers_that_differ_about_who_is_there_prove_nothing() -> None:
    both, one = frozenset({0, 1}), frozenset({0})
    assert totals([Report(1, 2, both), Report(3, 2, both)]) == (4, 4)
    assert totals([Report(1, 2, both), Report(3, 2, one)]) is None


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
