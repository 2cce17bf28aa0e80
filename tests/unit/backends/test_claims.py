"""Every chunk is taken by exactly one rank, in whatever order they claim; what an earlier work has left is nothing.

Each rank runs in a thread of its own, and after every single read or write of a shared word a random one of them goes
on: so the ranks meet in every state that a statement can leave behind. What a rank writes the others see later, as on
x86, at the next fence at the latest.
"""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from unit.backends.test_board import Stage, Words

from hvlike.backends.shared_memory.work_sync import LEAST_SHARED, WorkStealing

Run = tuple[int, int, int]
WORDS = 16
ENDED = 0
"""A word of each rank that the claims do not use: the number of the newest work it has ended."""


class Rank:
    """Takes what it can, work after work; each begins when all have ended the one before."""

    def __init__(self, rank: int, memory: list[list[int]], stage: Stage, runs: list[Run], works: int) -> None:
        self.taken: dict[int, list[Run]] = {}
        self._rank, self._stage, self._works = rank, stage, works
        counters = [SimpleNamespace(words=Words(words, stage, rank)) for words in memory]
        self._counters = counters
        region: Any = SimpleNamespace(
            rank=rank, ranks=len(memory), counters=counters, mine=counters[rank], fence=stage.stores[rank].leave
        )
        self._claims = WorkStealing(region, runs, 0)

    def run(self) -> None:
        self._stage.enter(self._rank)
        try:
            for number in range(1, self._works + 1):
                self._claims.begin(number)
                found = self.taken[number] = []
                while self._claims.unfinished:
                    found += self._claims.take(8)
                self._counters[self._rank].words[ENDED] = number
                while any(each.words[ENDED] < number for each in self._counters):
                    pass
        finally:
            self._stage.leave(self._rank)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("ranks", "chunks"),
    [(2, 0), (2, 5), (2, 2 * LEAST_SHARED), (2, 2 * LEAST_SHARED + 9), (3, 3 * LEAST_SHARED - 1), (4, 70)],
)
def test_every_chunk_is_taken_once(ranks: int, chunks: int, seed: int) -> None:
    runs = [(0, start, start + 1) for start in range(chunks)]
    memory = [[0] * WORDS for _ in range(ranks)]
    stage = Stage(ranks, seed)
    members = [Rank(rank, memory, stage, runs, 3) for rank in range(ranks)]
    threads = [threading.Thread(target=each.run) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2, 3):
        assert sorted(run for each in members for run in each.taken[number]) == runs


def test_a_rank_that_has_not_begun_is_helped_and_a_short_list_is_not() -> None:
    for chunks, expected in ((4 * LEAST_SHARED, 4 * LEAST_SHARED), (2 * LEAST_SHARED - 2, LEAST_SHARED - 1)):
        memory = [[0] * WORDS for _ in range(2)]
        counters = [SimpleNamespace(words=words) for words in memory]
        region: Any = SimpleNamespace(rank=1, ranks=2, counters=counters, mine=counters[1], fence=list)
        claims = WorkStealing(region, [(0, start, start + 1) for start in range(chunks)], 0)
        claims.begin(7)
        taken: list[Run] = []
        while claims.unfinished:
            taken += claims.take(8)
        assert len(set(taken)) == len(taken) == expected
