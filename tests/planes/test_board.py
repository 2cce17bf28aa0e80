"""On a board all ranks hear the same answer, whatever the order in which they look, begin, pass and withdraw.

Each rank runs in a thread of its own, and after every single read or write of a shared word a random one of them goes
on: so the ranks meet in every state that a statement can leave behind.
"""

import random
import threading

import pytest

from hvlike.planes.board import RING, WORDS, Board

pytestmark = pytest.mark.pure

THINGS = 8


class Stage:
    """Lets one thread at a time go on, and draws the next after every step."""

    def __init__(self, ranks, seed):
        self._random = random.Random(seed)
        self._alive = list(range(ranks))
        self._condition = threading.Condition()
        self._turn = 0

    def step(self, rank):
        with self._condition:
            self._turn = self._random.choice(self._alive)
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._turn == rank, 20)

    def enter(self, rank):
        with self._condition:
            assert self._condition.wait_for(lambda: self._turn == rank, 20)

    def leave(self, rank):
        with self._condition:
            self._alive.remove(rank)
            if self._alive:
                self._turn = self._random.choice(self._alive)
            self._condition.notify_all()


class Words:
    """The words of one rank as another one sees them: every access is a step."""

    def __init__(self, memory, stage, viewer):
        self._memory, self._stage, self._viewer = memory, stage, viewer

    def __getitem__(self, index):
        self._stage.step(self._viewer)
        return self._memory[index]

    def __setitem__(self, index, value):
        self._stage.step(self._viewer)
        self._memory[index] = value


def nothing():
    pass


class Rank:
    """Asks for THINGS things, some in the ordinary way, some by mistake for another thing than the others."""

    def __init__(self, rank, ranks, memory, data, stage, seed, *, leaves_at, returns):
        self.rank = rank
        self.answers = {}
        self.offers = {}
        self._random = random.Random(f"{seed} {rank}")
        self._stage = stage
        self._data = data
        self._leaves_at = leaves_at
        self._returns = returns
        self._board = Board([Words(memory[each], stage, rank) for each in range(ranks)], rank, nothing, nothing)

    def run(self):
        self._stage.enter(self.rank)
        try:
            for index in range(THINGS):
                if index == self._leaves_at:
                    self._board.set_away(True)
                    if not self._returns:
                        return
                    self._board.set_away(False)
                if self._random.random() < 0.15 or not self._board.is_free(index):
                    self._board.passed(index + 1)
                else:
                    self.answers[index] = self._ask(index)
        finally:
            self._stage.leave(self.rank)

    def _ask(self, index):
        kind = 1 if self._random.random() < 0.9 else 2
        self.offers[index] = kind
        self._data[self.rank][index % RING] = index
        self._board.begin(index, kind, 7)
        answer = None
        for _ in range(self._random.choice((2, 8, 40))):
            answer = self._board.look(index)
            if answer is not None:
                break
        if answer is None:
            answer = self._board.withdraw(index)
        while answer is None:
            answer = self._board.look(index)
        if answer:
            for copies in self._data:
                self._stage.step(self.rank)
                assert copies[index % RING] == index, "a copy was replaced before everybody had read it"
        self._board.finish(index)
        return answer


def play(ranks, seed, *, leaver=None, returns=False):
    """Let all ranks run to their end; returns them. leaver: goes away in the middle, perhaps for a moment only."""
    stage = Stage(ranks, seed)
    memory = [[0] * WORDS for _ in range(ranks)]
    data = [[-1] * RING for _ in range(ranks)]
    actors = [
        Rank(rank, ranks, memory, data, stage, seed, leaves_at=THINGS // 2 if rank == leaver else None, returns=returns)
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
    agreed = [check(play(ranks, seed)) for seed in range(60 if ranks == 2 else 30)]
    assert sum(agreed) > len(agreed), "hardly ever a yes: the test shows nothing"


@pytest.mark.parametrize("leaver", [0, 1])
def test_nobody_waits_for_a_rank_that_is_away(leaver):
    for seed in range(20):
        actors = play(2, seed, leaver=leaver)
        check(actors)
        assert not any(answer for index, answer in actors[1 - leaver].answers.items() if index >= THINGS // 2)


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_was_away_and_is_back_says_yes_to_nothing_that_the_others_have_given_up(leaver):
    # A rank that saw the head away took that for a no, without saying so; the head came back and said yes.
    for seed in range(60):
        check(play(2, seed, leaver=leaver, returns=True))


def test_a_thing_is_done_at_once_when_all_ask_for_it():
    memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(3)]
    boards = [Board(memory, rank, nothing, nothing) for rank in range(3)]
    for index in range(5):
        assert all(board.is_free(index) for board in boards)
        for board in boards[1:]:
            board.begin(index, 3, 9)
            assert board.look(index) is None
        boards[0].begin(index, 3, 9)
        assert [board.look(index) for board in boards] == [True, True, True]
        for board in boards:
            board.finish(index)


def test_a_place_is_not_used_again_before_all_are_through_with_it():
    memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(2)]
    boards = [Board(memory, rank, nothing, nothing) for rank in range(2)]
    for board in boards[::-1]:
        board.begin(0, 1, 1)
    assert [board.look(0) for board in boards] == [True, True]
    boards[0].finish(0)
    assert boards[0].is_free(1)
    assert not boards[0].is_free(RING)
    boards[1].finish(0)
    assert boards[0].is_free(RING)
