"""Ranks that offer the same operation agree without a coordinator; all that have offered it get the same answer."""

import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvlike.backends.shared_memory.board import WORDS, Board
from hvlike.collectives.controller.inline_agreement import Agreement, BoardAgreement, MessageAgreement, Offer
from hvlike.collectives.controller.tensor_queue import TensorQueue
from hvlike.collectives.requests.request import Request, RequestSpec

KIND, OTHER = 1, 2


class Ranks:
    """Some ranks and the messages between them: those from one rank to another arrive in their order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues = [TensorQueue(rank) for rank in range(size)]
        self.wires: dict[tuple[int, int, bool], deque[Any]] = {}
        self.ranks = [self.agreement(rank) for rank in range(size)]

    def agreement(self, rank: int) -> Agreement:
        raise NotImplementedError

    def try_offer(self, rank: int, index: int, kind: int, name: int) -> bool:
        """With the lock of the tensor queue; the operation is numbered if it is offered."""
        raise NotImplementedError

    def answer(self, rank: int) -> bool | None:
        """To what this rank has offered last."""
        raise NotImplementedError

    def peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.size) if peer != rank]

    def wire(self, source: int, target: int, offers: bool = False) -> deque[Any]:
        # Offers have a way of their own, and may overtake the others or be overtaken.
        return self.wires.setdefault((source, target, offers), deque())

    def sending(self, rank: int) -> Callable[[int, str, Any], None]:
        return lambda peer, what, value: self.wire(rank, peer).append((what, value))

    def offer(self, rank: int, kind: int = KIND, name: int = 7) -> bool:
        """False: not tried, and negotiated at once."""
        queue = self.queues[rank]
        with queue.lock:
            index = queue.entered
            tried = self.try_offer(rank, index, kind, name)
        if not tried:
            self.negotiate(rank)
        return tried

    def negotiate(self, rank: int) -> None:
        queue = self.queues[rank]
        request = Request(f"{queue.entered}", RequestSpec("allreduce"), [torch.ones(1)], lambda request: None)
        queue.enter(request, counted=False)

    def hurry(self, rank: int) -> None:
        """This rank has waited for long for what it has offered last."""
        self.ranks[rank].hurry(self.queues[rank].entered - 1)

    def begin_epoch(self, rank: int, *, joined: bool = False) -> None:
        self.queues[rank].begin_epoch()
        self.ranks[rank].begin_epoch(joined=joined)

    def deliver(self, order: random.Random | None = None) -> bool:
        """One message; False: there is none."""
        full = sorted(key for key, wire in self.wires.items() if wire)
        if not full:
            return False
        key = order.choice(full) if order else full[0]
        source, target, offers = key
        message = self.wires[key].popleft()
        hearing: Any = self.ranks[target]
        if offers:
            hearing.take(source, *message)
        else:
            hearing.hear(source, *message)
        return True

    def settle(self) -> list[bool | None]:
        while self.deliver():
            pass
        return [self.answer(rank) for rank in range(self.size)]


class RanksApart(Ranks):
    def agreement(self, rank: int) -> Agreement:
        return MessageAgreement(self.queues[rank], self.peers(rank), self.sending(rank))

    def try_offer(self, rank: int, index: int, kind: int, name: int) -> bool:
        agreement: Any = self.ranks[rank]
        if not agreement.may_offer(index):
            return False
        self.queues[rank].entered += 1
        agreement.offer(index, Offer(kind, name))
        for peer in self.peers(rank):
            self.wire(rank, peer, True).append(((index, kind, name, 0),))
        return True

    def answer(self, rank: int) -> bool | None:
        agreement: Any = self.ranks[rank]
        answer: bool | None = agreement.answer
        return answer


class RanksOfANode(Ranks):
    def __init__(self, size: int) -> None:
        memory = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(size)]
        self.boards = [
            Board(memory, rank, contextlib.nullcontext(), None, lambda: None, rank % 2) for rank in range(size)
        ]
        self.offered = [-1] * size
        super().__init__(size)

    def agreement(self, rank: int) -> Agreement:
        agreement = BoardAgreement(self.queues[rank], self.peers(rank), self.sending(rank))
        agreement.open(self.boards[rank], [])
        return agreement

    def try_offer(self, rank: int, index: int, kind: int, name: int) -> bool:
        self.answer(rank)
        board = self.boards[rank]
        if index != board.following and not board.is_free(index):
            return False
        self.queues[rank].entered += 1
        self.offered[rank] = index
        board.offer(index, kind, name)
        return True

    def answer(self, rank: int) -> bool | None:
        index = self.offered[rank]
        answer = None if index < 0 else self.boards[rank].look(index)
        if answer is None and self.ranks[rank].stopped:
            answer = False
        if answer is not None:
            self.boards[rank].finish(index)
        return answer


WAYS = [RanksApart, RanksOfANode]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> type[Ranks]:
    chosen: type[Ranks] = request.param
    return chosen


@pytest.fixture(params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest, way: type[Ranks]) -> Ranks:
    return way(request.param)


def test_all_do_what_all_have_offered(ranks: Ranks) -> None:
    for _ in range(3):
        for rank in range(ranks.size):
            assert ranks.offer(rank)
        assert ranks.settle() == [True] * ranks.size


def test_negotiated_operations_send_nothing(ranks: Ranks) -> None:
    for rank in range(ranks.size):
        ranks.negotiate(rank)
    assert not any(ranks.wires.values())


def test_a_late_rank_that_is_told_to_hurry_negotiates_that_operation_only(ranks: Ranks) -> None:
    last = ranks.size - 1
    for rank in range(last):
        ranks.offer(rank)
    ranks.settle()
    ranks.hurry(0)
    assert ranks.settle()[:last] == [False] * last
    assert not ranks.offer(last)
    for rank in range(ranks.size):
        assert ranks.offer(rank)
    assert ranks.settle() == [True] * ranks.size


def test_who_is_told_to_hurry_answers_who_has_asked(ranks: Ranks) -> None:
    last = ranks.size - 1
    for rank in range(last):
        ranks.offer(rank)
    ranks.settle()
    ranks.hurry(0)
    while not ranks.wire(last, 0) and ranks.deliver():
        pass
    assert list(ranks.wire(last, 0)) == [("pass", 0)]


def test_a_rank_that_is_away_passes(ranks: Ranks) -> None:
    ranks.offer(0)
    ranks.settle()
    for rank in range(1, ranks.size):
        ranks.ranks[rank].set_away(True)
    assert ranks.settle()[0] is False
    ranks.offer(0)
    assert ranks.settle()[0] is False


def test_after_an_epoch_an_older_offer_is_passed_and_a_newer_one_kept(ranks: Ranks) -> None:
    ranks.offer(0)
    ranks.settle()
    for rank in range(1, ranks.size):
        ranks.begin_epoch(rank)
    assert ranks.settle()[0] is False
    for rank in range(1, ranks.size):
        ranks.offer(rank)
    ranks.settle()
    ranks.begin_epoch(0)
    ranks.offer(0)
    assert ranks.settle() == [True] * ranks.size


def test_an_offer_that_spans_an_epoch_is_numbered_again() -> None:
    queue = TensorQueue(0)
    queue.entered = 5
    queue.begin_epoch()
    first = queue.entered
    queue.recount(4)
    assert queue.entered == first + 1
    queue.recount(first)
    assert queue.entered == first + 1


def test_a_peer_that_leaves_ends_the_wait(ranks: Ranks) -> None:
    ranks.offer(0)
    ranks.ranks[0].stop()
    assert ranks.answer(0) is False
    assert not ranks.offer(0)


@pytest.mark.parametrize("size", [2, 3])
def test_an_offer_that_was_given_up_before_it_was_sent_is_passed(size: int) -> None:
    ranks = RanksApart(size)
    ranks.offer(0)
    for peer in range(1, ranks.size):
        ranks.wires[0, peer, True].clear()
        ranks.offer(peer)
    agreement: Any = ranks.ranks[0]
    agreement.abandon(sent=False)
    assert ranks.settle()[1:] == [False] * (ranks.size - 1)


@pytest.mark.parametrize("seed", range(40))
def test_those_that_have_offered_decide_alike_whatever_comes_first(seed: int, way: type[Ranks]) -> None:
    order = random.Random(seed)
    ranks = way(order.choice([2, 3, 4]))
    for _ in range(30):
        offered, answers = [], []
        members = order.sample(range(ranks.size), ranks.size)
        for rank in members:
            for _ in range(order.randrange(4)):
                ranks.deliver(order)
            if order.random() < 0.1:
                ranks.negotiate(rank)
            elif ranks.offer(rank, KIND if order.random() < 0.95 else OTHER):
                offered.append(rank)
            if offered and order.random() < 0.1:
                ranks.hurry(offered[0])
        while ranks.deliver(order):
            pass
        answers = [ranks.answer(rank) for rank in offered]
        assert None not in answers
        assert len(set(answers)) <= 1
        assert len(offered) == ranks.size or True not in answers
        assert len({queue.entered for queue in ranks.queues}) == 1


def test_what_was_passed_before_the_board_is_open_stays_passed() -> None:
    ranks = RanksOfANode(2)
    late = BoardAgreement(ranks.queues[0], [1], ranks.sending(0))
    for index in (5, 2):
        late.hear(1, "hurry", index)
    late.open(ranks.boards[0], [])
    assert not ranks.boards[0].is_free(5)
    assert ranks.boards[0].is_free(6)


def test_who_has_joined_passes_until_all_have_and_offers_again_after_that(ranks: Ranks) -> None:
    ranks.ranks[0].set_away(True)
    for joined in (False, True):
        for rank in range(1, ranks.size):
            ranks.offer(rank)
        assert ranks.settle()[1:] == [False] * (ranks.size - 1)
        for rank in range(ranks.size):
            ranks.begin_epoch(rank, joined=joined)
    ranks.ranks[0].set_away(False)
    for rank in range(ranks.size):
        assert ranks.offer(rank)
    assert ranks.settle() == [True] * ranks.size
