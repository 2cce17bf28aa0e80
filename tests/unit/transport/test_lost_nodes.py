"""Which nodes are lost and which side of a partition goes on; who has which number after a loss. Without MPI."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.transport.failure import heartbeat
from hvlike.transport.failure.heartbeat import DEFAULT_SECONDS, Hearing, goes_on, heartbeat_limit
from hvlike.transport.failure.roles import Roles, assign_numbers

LIMIT = 8.0


@pytest.mark.parametrize(
    ("nodes", "lost", "goes"),
    [
        (((0, 1), (2, 3)), {1}, True),
        (((0, 1), (2, 3)), {0}, False),  # Of two halves the one with rank 0
        (((0,), (1,), (2,)), {0}, True),
        (((0,), (1,), (2,)), {0, 1}, False),
        (((0,), (1, 2, 3)), {0}, True),  # Ranks count, not nodes
        (((0,), (1, 2, 3)), {1}, False),
        (((0, 1), (2, 3), (4, 5), (6, 7)), {1, 2}, True),
        (((0, 1), (2, 3), (4, 5), (6, 7)), {0, 3}, False),
    ],
)
def test_the_majority_goes_on(nodes: Sequence[Sequence[int]], lost: set[int], goes: bool) -> None:
    assert goes_on(nodes, lost) is goes


def test_of_every_partition_at_most_one_side_goes_on() -> None:
    draw = random.Random(1)
    for _ in range(300):
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(2, 6))]
        numbers = iter(range(sum(sizes)))
        nodes = [tuple(next(numbers) for _ in range(size)) for size in sizes]
        side_of = [draw.randrange(3) for _ in nodes]
        going = [side for side in range(3) if side in side_of and goes_on(nodes, _without(side_of, side))]
        assert len(going) <= 1
        if len(set(side_of)) == 2:
            assert len(going) == 1


def _without(side_of: Sequence[int], side: int) -> set[int]:
    return {node for node, each in enumerate(side_of) if each != side}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_side_of_a_cut_loses_the_other_at_once_and_nobody_else(count: int) -> None:
    draw = random.Random(count)
    apart = {node: node >= max(1, count // 2) for node in range(count)}
    hearings = [Hearing(count, node, LIMIT, 0.0) for node in range(count)]
    losses: list[list[set[int]]] = [[] for _ in range(count)]
    for tick in range(1, 200):
        now = tick / 4
        for node, hearing in enumerate(hearings):
            lost = hearing.look(now + 1000 * node)  # Clocks of nodes do not agree
            if lost:
                losses[node].append(lost)
            if (tick + node) % 4 == 0:
                for other in draw.sample(range(count), min(count, 4)):
                    if now < 20 or apart[node] == apart[other]:
                        hearings[other].hear(hearing.clocks)
        if now < 20 + LIMIT / 2:
            assert not any(losses)
        if now > 20 + 1.6 * LIMIT:
            assert all(losses)
    for node in range(count):
        assert losses[node] == [{other for other in range(count) if apart[other] != apart[node]}]


def test_a_node_that_was_silent_before_a_cut_is_not_lost_alone() -> None:
    """Without the others this side is not the majority; with one of them that cannot be reached it seemed to be."""
    hearing = Hearing(3, 2, LIMIT, 0.0)
    losses = []
    for tick in range(1, 80):
        now = tick / 4
        if now < 4.5:
            hearing.hear([7.0, now, 0.0])
        losses += filter(None, [hearing.look(now)])
    assert losses == [{0, 1}]


def test_time_in_which_a_rank_did_not_look_is_nobodys_silence() -> None:
    hearing = Hearing(2, 0, LIMIT, 0.0)
    hearing.hear([0.0, 5.0])
    assert hearing.look(1.0) == set()
    # This process was stopped for a minute; the other one had no chance to be heard.
    assert hearing.look(61.0) == set()
    for tick in range(1, 100):
        if hearing.look(61.0 + tick / 4):
            break
    assert tick / 4 >= LIMIT - 2.0


def test_who_gives_up_counts_half_the_limit() -> None:
    hearing = Hearing(3, 0, LIMIT, 0.0)
    for tick in range(1, 24):
        hearing.hear([0.0, float(tick), 7.0])
        assert hearing.look(tick / 4) == set()
    # Another rank has noticed before this one, and nothing is heard any more.
    assert hearing.conclude() == {2}
    assert hearing.conclude() == set()


def test_old_news_is_no_sign_of_life() -> None:
    hearing = Hearing(3, 0, LIMIT, 0.0)
    lost: set[int] = set()
    for tick in range(1, 80):
        # Node 1 lives, and goes on telling what it has last heard of node 2.
        hearing.hear([0.0, float(tick), 7.0])
        lost |= hearing.look(tick / 4)
    assert lost == {2}


def test_the_default_needs_several_nodes_and_ranks_that_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (False, True):
        monkeypatch.setattr(heartbeat.fault_tolerance, "is_enabled", lambda environ, enabled=enabled: enabled)
        assert heartbeat_limit(None, nodes=2) == (DEFAULT_SECONDS if enabled else 0.0)
        assert heartbeat_limit(None, nodes=1) == 0.0
        assert heartbeat_limit(3.0, nodes=1) == 3.0
        assert heartbeat_limit(0.0, nodes=2) == 0.0


@pytest.mark.parametrize("sizes", [(2, 2), (1, 8), (8, 8), (1, 1, 6), (8,) * 5])
def test_no_rank_hears_less_than_its_node(sizes: Sequence[int]) -> None:
    """Of the ranks of a node one gets a message: alone, each of eight would hear too little now and then."""
    draw, count = random.Random(1), len(sizes)
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    rows = [[0] * count for _ in node_of]
    hearings = [Hearing(count, node, LIMIT, 0.0) for node in node_of]
    beat = LIMIT / heartbeat.BEATS
    for tick in range(1, 1000):
        now = tick * beat / 4
        for rank, hearing in enumerate(hearings):
            if (tick + rank) % 4 == 0:
                for other, row in enumerate(rows):
                    if other != rank and node_of[other] == node_of[rank]:
                        hearing.read(row)
                for node in set(node_of) - {node_of[rank]}:
                    listener = draw.choice([each for each, place in enumerate(node_of) if place == node])
                    hearings[listener].hear(hearing.clocks)
                    hearings[listener].write(rows[listener])
            assert hearing.look(now) == set()
            assert hearing.conclude() == set()


def test_a_rank_takes_for_lost_whom_another_one_of_its_node_does() -> None:
    first, second = (Hearing(3, 0, LIMIT, 0.0) for _ in range(2))
    row = [0] * 3
    for tick in range(1, 40):
        first.hear([0.0, float(tick), 7.0])
        if first.look(tick / 4):
            break
    first.write(row)
    # The other one was stopped meanwhile: for all that it knows nobody has been silent.
    second.read(row)
    assert second.conclude() == {2}
    assert second.look(1.0) == set()
    third = Hearing(3, 0, LIMIT, 0.0)
    third.read(row)
    assert third.look(1.0) == {2}
    # What it tells other nodes is no sign of life of the lost one.
    elsewhere = Hearing(3, 1, LIMIT, 0.0)
    elsewhere.hear([0, 0, 7])
    elsewhere.look(1.0)
    elsewhere.hear(third.clocks)
    assert elsewhere.clocks[2] == 7


@pytest.mark.parametrize(
    ("previous", "size", "without_state", "numbers"),
    [
        pytest.param([0, 1, 3, None, None], 4, [], [0, 1, 3, 2, None], id="a spare takes that of the lost rank"),
        pytest.param([1, 2, None], 3, [], [0, 2, 1], id="rank 0 is one that has trained"),
        pytest.param([2, 0, None], 3, [1], [0, 2, 1], id="a spare without a state gives rank 0 away"),
        pytest.param([0, 2, 3], 4, [], [0, 2, 3], id="without spares the others keep theirs"),
        pytest.param([2, 3], 4, [], [2, 3], id="without rank 0, too"),
        pytest.param([2, 3], 4, [0], [3, 2], id="but the lowest is one that has trained"),
        pytest.param([None, None, None], 2, [], [0, 1, None], id="spares alone start from the beginning"),
    ],
)
def test_who_has_which_number_after_a_loss(
    previous: list[int | None], size: int, without_state: list[int], numbers: list[int | None]
) -> None:
    holds = [number is not None and place not in without_state for place, number in enumerate(previous)]
    assert assign_numbers(previous, size, holds) == numbers


@given(st.integers(1, 6), st.integers(0, 4), st.data())
def test_numbers_are_given_once_and_as_many_as_can_be(size: int, spares: int, data: st.DataObject) -> None:
    everybody: list[int | None] = [*range(size), *[None] * spares]
    left = data.draw(st.lists(st.sampled_from(range(len(everybody))), unique=True, min_size=1).map(sorted))
    previous = [everybody[place] for place in left]
    holds = [number is not None and data.draw(st.booleans()) for number in previous]
    numbers = assign_numbers(previous, size, holds)
    given_out = [each for each in numbers if each is not None]
    assert len(set(given_out)) == len(given_out) == min(size, len(left))
    if any(holds):
        assert holds[numbers.index(min(given_out))]
    moved = [place for place, number in enumerate(previous) if number is not None and numbers[place] != number]
    assert len(moved) <= 2, "only the one that becomes rank 0, and the one that was"


def test_the_last_processes_are_spares_at_the_start() -> None:
    roles = [Roles.at_start(position, 4, 1) for position in range(4)]
    assert [each.number for each in roles] == [0, 1, 2, None]
    assert {(each.size, each.spares) for each in roles} == {(3, (3,))}


def test_without_a_spare_the_numbers_close_up() -> None:
    told = [(0, 4, True), (3, 4, True)]
    roles = [Roles.at_start(number, 4, 0).after_loss(position, told) for position, (number, *_) in enumerate(told)]
    assert [(each.number, each.size, each.spares) for each in roles] == [(0, 2, ()), (1, 2, ())]
    assert roles[0].renumbered == roles[1].renumbered == {0: 0, 3: 1}


def test_after_several_losses_the_first_numbers_lead_to_those_of_now_until_they_are_settled() -> None:
    roles = Roles.at_start(3, 4, 0)
    for told in ([(0, 4, True), (2, 4, True), (3, 4, True)], [(1, 3, True), (2, 3, True)]):
        roles = roles.after_loss(len(told) - 1, told)
    assert (roles.number, roles.size) == (1, 2)
    assert roles.renumbered == {2: 0, 3: 1}
    assert roles.settled().renumbered == {0: 0, 1: 1}


def test_who_has_not_trained_knows_the_size_from_the_others() -> None:
    told = [(0, 3, True), (None, 1, False), (None, 3, False)]
    roles = [Roles.at_start(place, 5, 2).after_loss(place, told) for place in range(3)]
    assert [each.number for each in roles] == [0, 1, 2]
    assert {each.size for each in roles} == {3}
