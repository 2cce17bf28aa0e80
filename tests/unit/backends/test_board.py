"""Words that ranks share: all hear the same answer on a board, and every chunk of a work is taken by exactly one rank.

Simulated ranks come to the moments between any two statements, and see late what others write (support/simulation).
"""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.backends.node import regions
from support.simulation.run import Draw, what_is_wrong

from hvlike.backends.shared_memory.board import RING, WORDS, Board
from hvlike.backends.shared_memory.region import Region, region_bytes
from hvlike.backends.shared_memory.work_sync import LEAST_SHARED, WorkStealing
from hvlike.system.system import system
from hvlike.transport.loop.spin import SpinPolicy
from hvlike.transport.memory.doorbell import Fence


@pytest.mark.parametrize("seed", range(100, 112))
def test_all_hear_the_same_answer(seed: int) -> None:
    job = Draw.of(seed, ["board"], range(2, 5), range(1, 2))
    assert what_is_wrong(job.run(), job) is None


def boards(ranks: int, wake: Any = None) -> list[Board]:
    memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(ranks)]
    return [Board(memory, rank, contextlib.nullcontext(), None, wake, 0) for rank in range(ranks)]


def test_nobody_waits_for_a_rank_that_is_away() -> None:
    here, away = boards(2)
    away.passed(9)
    assert not away.is_free(8)
    for index in range(3):
        assert here.is_free(index)
        assert here.offer(index, 1, 1) is None
        assert here.look(index) is False


def test_a_place_is_not_used_again_before_all_are_through_with_it() -> None:
    first, second = boards(2)
    assert second.offer(0, 1, 1) is None
    assert first.offer(0, 1, 1) is True
    assert second.look(0) is True
    first.finish(0)
    assert first.is_free(1)
    assert not first.is_free(RING)
    second.finish(0)
    assert first.is_free(RING)


def test_the_last_to_come_wakes_those_that_sleep() -> None:
    woken: list[bool] = []
    first, second = boards(2, lambda: woken.append(True))
    for index, sleeps in enumerate((False, True, False)):
        assert first.offer(index, 1, 1) is None
        first.set_asleep(sleeps)
        assert first.look(index) is None
        assert second.offer(index, 1, 1) is True
        assert len(woken) == (index > 0)
        first.set_asleep(False)
        assert first.look(index) is True
        for board in (first, second):
            board.finish(index)


def test_an_interrupt_in_the_middle_leaves_an_offer_or_a_pass() -> None:
    @contextlib.contextmanager
    def interrupting() -> Any:
        raise KeyboardInterrupt
        yield  # Of a generator

    first, second = boards(2)
    memory = [first.mine, second.mine]
    first = Board(memory, 0, interrupting(), None, lambda: None, 0)
    with pytest.raises(KeyboardInterrupt):
        first.offer(0, 1, 1)
    assert first.look(0) is None
    assert second.offer(0, 1, 1) is True
    assert first.look(0) is True


Run = tuple[int, int, int]


def runs_of(chunks: int) -> list[Run]:
    return [(0, start, start + 1) for start in range(chunks)]


@dataclass
class Works:
    """Ranks that take what they can, work after work; each begins when all have ended the one before."""

    ranks: int
    runs: list[Run]
    memory: list[Any] = field(default_factory=list)
    ended: list[int] = field(default_factory=lambda: [0, 0, 0])
    taken: list[list[Run]] = field(default_factory=lambda: [[], [], []])

    def __call__(self, hvd: Any, rank: int) -> None:
        if not self.memory:
            self.memory.append(system.make_offer(region_bytes(self.ranks, 64), 0).segment)  # type: ignore[union-attr]
        bells: Any = [SimpleNamespace(asleep=[0])] * self.ranks
        region = Region(self.memory[0], rank, self.ranks, 64, bells, Fence(), spin=SpinPolicy(crowded=True))
        claims = WorkStealing(region, self.runs, 0)
        for number, taken in enumerate(self.taken):
            claims.begin(number + 1)
            while claims.unfinished:
                taken += claims.take(8)
            self.ended[number] += 1
            while self.ended[number] < self.ranks:
                system.sleep(1e-5)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(
    ("ranks", "chunks"),
    [(2, 0), (2, 5), (2, 2 * LEAST_SHARED), (2, 2 * LEAST_SHARED + 9), (3, 3 * LEAST_SHARED - 1), (4, 70)],
)
def test_every_chunk_is_taken_once(ranks: int, chunks: int, seed: int) -> None:
    program = Works(ranks, runs_of(chunks))
    job = Draw.of(seed, ["board"], range(ranks, ranks + 1), range(1, 2))
    assert what_is_wrong(job.run(program), job) is None
    assert [sorted(each) for each in program.taken] == [program.runs] * 3


def test_a_rank_that_has_not_begun_is_helped_and_a_short_list_is_not() -> None:
    for chunks, expected in ((4 * LEAST_SHARED, 4 * LEAST_SHARED), (2 * LEAST_SHARED - 2, LEAST_SHARED - 1)):
        claims = WorkStealing(regions(2)[1], runs_of(chunks), 0)
        claims.begin(7)
        taken: list[Run] = []
        while claims.unfinished:
            taken += claims.take(8)
        assert len(set(taken)) == len(taken) == expected
