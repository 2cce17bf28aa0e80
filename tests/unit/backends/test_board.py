"""Words that ranks share: all hear the same answer on a board, and every chunk of a work is taken by exactly one rank.

Each rank runs in a thread of its own, and after every single read or write of a shared word a random one of them goes
on: so the ranks meet in every state that a statement can leave behind. What a rank writes the others see later, as on
x86, at the next barrier at the latest.
"""

import contextlib
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.backends.shared_memory.board import RING, WORDS, Board
from hvlike.backends.shared_memory.work_sync import LEAST_SHARED, WorkStealing

THINGS = 8


class Stage:
    """Lets one thread at a time go on, and draws the next after every step."""

    def __init__(self, ranks, seed):
        self._random = random.Random(seed)
        self._alive = list(range(ranks))
        self._condition = threading.Condition()
        self._turn = 0
        self.stores = [Stores() for _ in range(ranks)]

    def step(self, rank):
        with self._condition:
            stores = self._random.choice(self.stores)
            if len(stores) and self._random.random() < 0.3:
                stores.leave(self._random.randint(1, len(stores)))
            self._turn = self._random.choice(self._alive)
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._turn == rank, 20)

    def enter(self, rank):
        with self._condition:
            assert self._condition.wait_for(lambda: self._turn == rank, 20)

    def leave(self, rank):
        with self._condition:
            self.stores[rank].leave(len(self.stores[rank]))
            self._alive.remove(rank)
            if self._alive:
                self._turn = self._random.choice(self._alive)
            self._condition.notify_all()


class Stores:
    """What one rank has written and no other sees yet, as on x86: it gets out in order, some time."""

    def __init__(self):
        self._waiting = []

    def write(self, memory, index, value):
        self._waiting.append((memory, index, value))

    def read(self, memory, index):
        for target, place, value in reversed(self._waiting):
            if target is memory and place == index:
                return value
        return memory[index]

    def leave(self, count=None):
        """So many get out now; all of them at a fence."""
        count = len(self) if count is None else count
        for memory, index, value in self._waiting[:count]:
            memory[index] = value
        del self._waiting[:count]

    def __len__(self):
        return len(self._waiting)

    # As a barrier.
    def __enter__(self):
        self.leave()

    def __exit__(self, *_):
        pass


class Words:
    """The words of one rank as another one sees them: every access is a step."""

    def __init__(self, memory, stage, viewer):
        self._memory, self._stage, self._viewer = memory, stage, viewer
        self._stores = stage.stores[viewer]

    def __getitem__(self, index):
        if isinstance(index, slice):
            # A view of some words, which nobody has read yet.
            return self._memory[index]
        self._stage.step(self._viewer)
        return self._stores.read(self._memory, index)

    def __setitem__(self, index, value):
        self._stage.step(self._viewer)
        self._stores.write(self._memory, index, value)


def nothing():
    pass


class Rank:
    """Asks for THINGS things, some in the ordinary way, some by mistake for another thing than the others."""

    def __init__(self, rank, ranks, memory, data, stage, seed, hurried, running, *, leaves_at):
        """hurried: by rank, the things that it is told to hurry to. running: who still asks for things."""
        self.rank = rank
        self.answers = {}
        self.offers = {}
        self._random = random.Random(f"{seed} {rank}")
        self._stage = stage
        self._data = [Words(copies, stage, rank) for copies in data]
        self._hurried, self._running = hurried, running
        self._entered = 0
        self._leaves_at = leaves_at
        blocks = [Words(memory[each], stage, rank) for each in range(ranks)]
        self._board = Board(blocks, rank, stage.stores[rank], None, nothing, self._random.choice((0, 3, 20)))

    def run(self):
        self._stage.enter(self.rank)
        try:
            for index in range(THINGS):
                self._serve()
                if index == self._leaves_at:
                    self._board.passed(THINGS + 1)
                free = index == self._board.following or self._board.is_free(index)
                self._entered = index + 1
                if self._random.random() < 0.15 or not free:
                    self._board.passed(index + 1)
                else:
                    self.answers[index] = self._ask(index)
            self._running.remove(self.rank)
            while self._running:
                self._stage.step(self.rank)
                self._serve()
        finally:
            self._running.discard(self.rank)
            self._stage.leave(self.rank)

    def _serve(self):
        """What the loop does beside: pass what others wait for and this rank has not come to."""
        while self._hurried[self.rank]:
            index = self._hurried[self.rank].pop()
            if index >= self._entered:
                self._board.passed(index + 1)

    def _ask(self, index):
        kind = 1 if self._random.random() < 0.9 else 2
        self.offers[index] = kind
        self._data[self.rank][index % RING] = index
        answer = self._board.offer(index, kind, 7)
        looks = self._random.choice((0, 2, 8, 40))
        while answer is None:
            if looks == 0:
                for peer, told in enumerate(self._hurried):
                    if peer != self.rank:
                        told.append(index)
            looks -= 1
            self._serve()
            answer = self._board.look(index)
        if answer:
            for copies in self._data:
                assert copies[index % RING] == index, "a copy was replaced before everybody had read it"
        self._board.finish(index)
        return answer


def play(ranks, seed, *, leaver=None):
    """Let all ranks run to their end; returns them. leaver: is away from the middle on."""
    stage = Stage(ranks, seed)
    memory = [[0] * WORDS for _ in range(ranks)]
    data = [[-1] * RING for _ in range(ranks)]
    shared = [[] for _ in range(ranks)], set(range(ranks))
    actors = [
        Rank(rank, ranks, memory, data, stage, seed, *shared, leaves_at=THINGS // 2 if rank == leaver else None)
        for rank in range(ranks)
    ]
    errors = []

    def run(actor):
        try:
            actor.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(actor,)) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors[0]
    return actors


def check(actors):
    """The same answer for all, and a yes only to what all have offered; returns how often it was yes."""
    agreed = 0
    for index in range(THINGS):
        answers = {actor.answers[index] for actor in actors if index in actor.answers}
        assert len(answers) <= 1, f"thing {index}: {[actor.answers.get(index) for actor in actors]}"
        if True in answers:
            agreed += 1
            assert {actor.offers.get(index) for actor in actors} in ({1}, {2})
    return agreed


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_hear_the_same_answer(ranks):
    agreed = [check(play(ranks, seed)) for seed in range(200 if ranks == 2 else 80)]
    assert sum(agreed) > len(agreed), "hardly ever a yes: the test shows nothing"


@pytest.mark.parametrize("leaver", [0, 1])
def test_nobody_waits_for_a_rank_that_is_away(leaver):
    for seed in range(20):
        actors = play(2, seed, leaver=leaver)
        check(actors)
        assert not any(answer for index, answer in actors[1 - leaver].answers.items() if index >= THINGS // 2)


def boards(ranks, wake=nothing):
    memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(ranks)]
    return [Board(memory, rank, contextlib.nullcontext(), None, wake, 0) for rank in range(ranks)]


def test_a_place_is_not_used_again_before_all_are_through_with_it():
    first, second = boards(2)
    assert second.offer(0, 1, 1) is None
    assert first.offer(0, 1, 1) is True
    assert second.look(0) is True
    first.finish(0)
    assert first.is_free(1)
    assert not first.is_free(RING)
    second.finish(0)
    assert first.is_free(RING)


def test_the_last_to_come_wakes_those_that_sleep():
    woken = []
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


def test_an_interrupt_in_the_middle_leaves_an_offer_or_a_pass():
    class Interrupting:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            pass

    memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(2)]
    first = Board(memory, 0, Interrupting(), None, nothing, 0)
    second = Board(memory, 1, contextlib.nullcontext(), None, nothing, 0)
    with pytest.raises(KeyboardInterrupt):
        first.offer(0, 1, 1)
    assert first.look(0) is None
    assert second.offer(0, 1, 1) is True
    assert first.look(0) is True


Run = tuple[int, int, int]

WORK_WORDS = 16
ENDED = 0
"""A word of each rank that the claims do not use: the number of the newest work it has ended."""


class Worker:
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
    memory = [[0] * WORK_WORDS for _ in range(ranks)]
    stage = Stage(ranks, seed)
    members = [Worker(rank, memory, stage, runs, 3) for rank in range(ranks)]
    threads = [threading.Thread(target=each.run) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2, 3):
        assert sorted(run for each in members for run in each.taken[number]) == runs


def test_a_rank_that_has_not_begun_is_helped_and_a_short_list_is_not() -> None:
    for chunks, expected in ((4 * LEAST_SHARED, 4 * LEAST_SHARED), (2 * LEAST_SHARED - 2, LEAST_SHARED - 1)):
        memory = [[0] * WORK_WORDS for _ in range(2)]
        counters = [SimpleNamespace(words=words) for words in memory]
        region: Any = SimpleNamespace(rank=1, ranks=2, counters=counters, mine=counters[1], fence=list)
        claims = WorkStealing(region, [(0, start, start + 1) for start in range(chunks)], 0)
        claims.begin(7)
        taken: list[Run] = []
        while claims.unfinished:
            taken += claims.take(8)
        assert len(set(taken)) == len(taken) == expected
