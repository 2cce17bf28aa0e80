"""Ranks that offer the same operation agree without a coordinator; all that have offered it get the same answer."""

import random
from collections import deque
from typing import Any

import pytest
import torch

from hvlike.collectives.controller.inline_agreement import Agreement, Offer
from hvlike.collectives.controller.tensor_queue import TensorQueue
from hvlike.collectives.requests.request import Request, RequestSpec

KIND, OTHER = 1, 2


class Ranks:
    """Some ranks and the messages between them: those from one rank to another arrive in their order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues = [TensorQueue(rank) for rank in range(size)]
        self.wires: dict[tuple[int, int, bool], deque[Any]] = {}
        self.ranks = [
            Agreement(
                self.queues[rank],
                [peer for peer in range(size) if peer != rank],
                lambda peer, what, value, rank=rank: self._wire(rank, peer, False).append((what, value)),
            )
            for rank in range(size)
        ]

    def _wire(self, source: int, target: int, offers: bool) -> deque[Any]:
        # Offers have a way of their own, and may overtake the others or be overtaken.
        return self.wires.setdefault((source, target, offers), deque())

    def offer(self, rank: int, kind: int = KIND, name: int = 7) -> bool:
        """False: not tried, and negotiated at once."""
        queue, agreement = self.queues[rank], self.ranks[rank]
        with queue.lock:
            index = queue.entered
            tried = agreement.may_offer(index)
            if tried:
                queue.entered += 1
                agreement.offer(index, Offer(kind, name))
        if not tried:
            self.negotiate(rank)
            return False
        for peer in range(self.size):
            if peer != rank:
                self._wire(rank, peer, True).append(((index, kind, name, 0),))
        return True

    def negotiate(self, rank: int) -> None:
        queue = self.queues[rank]
        request = Request(f"{queue.entered}", RequestSpec("allreduce"), [torch.ones(1)], lambda request: None)
        queue.enter(request, counted=False)

    def deliver(self, order: random.Random | None = None) -> bool:
        """One message; False: there is none."""
        full = sorted(key for key, wire in self.wires.items() if wire)
        if not full:
            return False
        key = order.choice(full) if order else full[0]
        source, target, offers = key
        message = self.wires[key].popleft()
        if offers:
            self.ranks[target].take(source, *message)
        else:
            self.ranks[target].hear(source, *message)
        return True

    def settle(self) -> list[bool | None]:
        while self.deliver():
            pass
        return [each.answer for each in self.ranks]


@pytest.fixture(params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def test_all_do_what_all_have_offered(ranks: Ranks) -> None:
    for _ in range(3):
        for rank in range(ranks.size):
            assert ranks.offer(rank)
        assert ranks.settle() == [True] * ranks.size


@pytest.mark.parametrize("other", [{"kind": OTHER}, {"name": 8}], ids=str)
def test_nobody_does_what_one_has_not_offered(ranks: Ranks, other: dict[str, int]) -> None:
    for rank in range(ranks.size - 1):
        ranks.offer(rank)
    ranks.offer(ranks.size - 1, **other)
    assert ranks.settle() == [False] * ranks.size


def test_a_rank_that_negotiates_passes_before_and_after_it_hears_of_an_offer(ranks: Ranks) -> None:
    ranks.offer(0)
    ranks.settle()
    assert ranks.ranks[0].answer is None
    for rank in range(1, ranks.size):
        ranks.negotiate(rank)
    assert ranks.settle()[0] is False
    ranks.negotiate(1)
    ranks.offer(0)
    assert ranks.settle()[0] is False


def test_negotiated_operations_send_nothing(ranks: Ranks) -> None:
    for rank in range(ranks.size):
        ranks.negotiate(rank)
    assert not any(ranks.wires.values())


def test_a_late_rank_that_is_told_to_hurry_negotiates_that_operation_only(ranks: Ranks) -> None:
    last = ranks.size - 1
    for rank in range(last):
        ranks.offer(rank)
    ranks.settle()
    ranks.ranks[0].hurry()
    assert ranks.settle()[:last] == [False] * last
    assert not ranks.offer(last)
    for rank in range(ranks.size):
        assert ranks.offer(rank)
    assert ranks.settle() == [True] * ranks.size


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
    for queue, agreement in zip(ranks.queues[1:], ranks.ranks[1:], strict=True):
        queue.begin_epoch()
        agreement.begin_epoch()
    assert ranks.settle()[0] is False
    for rank in range(1, ranks.size):
        ranks.offer(rank)
    ranks.settle()
    ranks.queues[0].begin_epoch()
    ranks.ranks[0].begin_epoch()
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
    assert ranks.ranks[0].answer is False
    assert not ranks.offer(0)


def test_an_offer_that_was_given_up_before_it_was_sent_is_passed(ranks: Ranks) -> None:
    ranks.offer(0)
    for peer in range(1, ranks.size):
        ranks.wires[0, peer, True].clear()
        ranks.offer(peer)
    ranks.ranks[0].abandon(sent=False)
    assert ranks.settle()[1:] == [False] * (ranks.size - 1)


@pytest.mark.parametrize("seed", range(40))
def test_those_that_have_offered_decide_alike_whatever_comes_first(seed: int) -> None:
    order = random.Random(seed)
    ranks = Ranks(order.choice([2, 3, 4]))
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
                ranks.ranks[offered[0]].hurry()
        while ranks.deliver(order):
            pass
        answers = [ranks.ranks[rank].answer for rank in offered]
        assert None not in answers
        assert len(set(answers)) <= 1
        assert len(offered) == ranks.size or True not in answers
        assert len({queue.entered for queue in ranks.queues}) == 1
