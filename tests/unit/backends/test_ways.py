"""Ways across nodes: what they cost after the model, the levels of recursive reductions, and the pace of exchanges."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from hvlike.backends.network.cost_model import (
    LARGEST_GROUP,
    MeasuredNetwork,
    NetworkConstants,
    Way,
    choose,
    cost,
    members,
    message,
    primes,
)
from hvlike.backends.network.partition import fold
from hvlike.backends.network.progress import SLOW_BYTES_PER_SECOND, SMALLEST_SAMPLE, BandwidthEstimator
from hvlike.backends.network.recursive_reduction import partner_of, steps_of

VETH = NetworkConstants(latency=30e-6, overhead=25e-6, gap=25e-6, gap_per_byte=0.8e-9, fold=0.2e-9)
"""Between network namespaces of one machine: TCP, moved by its cores."""

FAST = NetworkConstants(latency=2e-6, overhead=1.5e-6, gap=1.5e-6, gap_per_byte=0.08e-9, fold=0.1e-9)
FAR = NetworkConstants(latency=1e-3, overhead=10e-6, gap=10e-6, gap_per_byte=0.8e-9, fold=0.2e-9)
RANKS = [2, 3, 4, 5, 6, 8, 12, 16, 17, 37, 64, 97, 1000, 1024, 4099, 100_000]
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("ranks", RANKS)
def test_levels_are_the_prime_factors_or_some_of_them_merged(ranks: int) -> None:
    for nbytes in (8, 64 * KIB, MIB, 64 * MIB):
        way = choose(FAST, ranks, nbytes)
        assert math.prod(way.levels) == members(ranks)
        assert max(way.levels) <= LARGEST_GROUP
        assert [each for radix in way.levels for each in primes(radix)] == list(primes(members(ranks)))


def test_two_ranks_swap_up_to_three_quarters_of_a_mebibyte() -> None:
    # As measured between two hosts.
    assert {choose(VETH, 2, size * KIB).name for size in (1, 64, 512)} == {"swap"}
    assert {choose(VETH, 2, size * MIB).name for size in (1, 8, 64)} == {"pairwise"}


def test_sums_of_16_bit_floats_are_twice_as_large_so_more_ranks_send_to_all() -> None:
    assert choose(VETH, 4, 64 * KIB).levels == (2, 2)
    assert choose(VETH, 4, 64 * KIB, widened=2).levels == (4,)


@pytest.mark.parametrize("constants", [VETH, FAST, FAR])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("nbytes", [8, 4 * KIB, 64 * KIB, MIB, 64 * MIB])
def test_no_way_of_merging_costs_less_than_the_chosen_one(constants: NetworkConstants, ranks: int, nbytes: int) -> None:
    least = min(
        cost(constants, ranks, nbytes, Way(sharded, levels))
        for levels in merged(primes(ranks))
        for sharded in (False, True)
    )
    assert cost(constants, ranks, nbytes, choose(constants, ranks, nbytes)) == pytest.approx(least)


def merged(factors: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not factors:
        return [()]
    heads = ((math.prod(factors[:end]), factors[end:]) for end in range(1, len(factors) + 1))
    return [(head, *rest) for head, left in heads for rest in merged(left)]


def test_a_swap_is_one_message_and_a_pairwise_exchange_two() -> None:
    assert cost(VETH, 2, 1e6, Way(False, (2,))) == pytest.approx(message(VETH, 1e6) + 1e6 * VETH.fold)
    assert cost(VETH, 2, 1e6, Way(True, (2,))) == pytest.approx(2 * message(VETH, 5e5) + 5e5 * VETH.fold)


def test_ranks_beyond_the_levels_cost_a_message_before_and_one_after() -> None:
    assert (members(37), members(97), members(1024)) == (36, 96, 1024)
    way = Way(False, (2, 2, 3, 3))
    assert cost(FAST, 37, 1e4, way) - cost(FAST, 36, 1e4, way) == pytest.approx(
        2 * message(FAST, 1e4) + 1e4 * FAST.fold
    )


def test_messages_ask_the_receiver_where_that_costs_less_than_a_copy() -> None:
    near = MeasuredNetwork(latency=10e-6, overhead=4e-6, gap=4e-6, gap_per_byte=0.3e-9, fold=0.1e-9)
    assert near.early_bytes == 200_000
    assert replace(near, latency=1e-3).early_bytes == 20_000_000
    assert replace(near, gap_per_byte=8e-9).early_bytes > 1 << 40
    # TCP with BBR takes twice as long for messages that ask, whatever their length.
    assert replace(near, paced=True).early_bytes > 1 << 40


WAYS = {
    2: [(2,)],
    3: [(3,)],
    4: [(2, 2), (4,)],
    6: [(2, 3), (6,)],
    12: [(2, 2, 3), (4, 3), (2, 6), (12,)],
    30: [(2, 3, 5), (6, 5)],
    37: [(2, 2, 3, 3), (4, 9)],
    41: [(2, 2, 2, 5)],
}
CASES = [(size, Way(sharded, levels)) for size, found in WAYS.items() for levels in found for sharded in (False, True)]


def test_with_one_rank_too_many_the_first_gives_what_it_has_to_the_second() -> None:
    assert [partner_of(rank, 37) for rank in range(4)] == [1, 0, None, None]
    assert steps_of(1, 37, 8, Way(False, (4, 9)))[0].group == [1, 2, 3, 4]


@pytest.mark.parametrize(("size", "way"), CASES)
def test_every_rank_ends_with_the_sum_of_all(size: int, way: Way) -> None:
    elements = 41
    sums = simulate(size, elements, way)
    taking = [rank for rank in range(size) if partner_of(rank, size) is None or rank % 2]
    assert len(taking) == members(size)
    if way.sharded:
        parts = sorted(each for rank in taking for each in sums[rank])
        assert parts == list(range(elements))
    else:
        assert all(sorted(sums[rank]) == list(range(elements)) for rank in taking)
    texts = {text for rank in taking for text in sums[rank].values()}
    assert len(texts) == 1, "an element is added in another order on another rank"


@pytest.mark.parametrize("size", WAYS)
def test_the_order_of_a_sum_does_not_depend_on_the_way(size: int) -> None:
    found = {next(iter(simulate(size, 3 * size, way)[1].values())) for each, way in CASES if each == size}
    assert len(found) == 1


def test_the_order_of_twelve_contributions() -> None:
    assert order(list("0123")) == "((0+1)+(2+3))"
    assert order(list("012")) == "((0+1)+2)"
    assert order([chr(ord("a") + each) for each in range(12)]) == "((((a+b)+(c+d))+((e+f)+(g+h)))+((i+j)+(k+l)))"


def order(texts: list[str]) -> str:
    pieces = [[text] for text in texts]
    fold(pieces, add)
    return pieces[0][0]


def add(target: list[str], other: list[str]) -> None:
    target[0] = f"({target[0]}+{other[0]})"


def simulate(size: int, elements: int, way: Way) -> list[dict[int, str]]:
    """What each rank holds after the levels: the sum of each of its elements, spelled out."""
    held = [{each: str(rank) for each in range(elements)} for rank in range(size)]
    for rank in range(1, size, 2):
        if partner_of(rank, size) is not None:
            held[rank] = dict.fromkeys(range(elements), f"({rank - 1}+{rank})")
    schedules = {
        rank: steps_of(rank, size, elements, way) for rank in range(size) if partner_of(rank, size) is None or rank % 2
    }
    for number in range(len(way.levels)):
        before = held
        held = list(before)
        for rank, steps in schedules.items():
            step = steps[number]
            assert step.group[step.position] == rank
            # All see the same group and the same parts.
            assert all(schedules[peer][number][:2] == step[:2] for peer in step.group)
            mine = range(*step.parts[step.position])
            held[rank] = {each: order([before[peer][each] for peer in step.group]) for each in mine}
    return held


MESSAGE = SMALLEST_SAMPLE // 4


class Exchanges:
    """Of messages, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = BandwidthEstimator(lambda: self.now)

    def make(self, seconds: Iterable[float]) -> bool:
        """One of messages that arrive after so many seconds each; whether the network counts as slow after it."""
        self.pace.begin()
        for each in seconds:
            self.now += each
            self.pace.arrived(MESSAGE)
        self.pace.end()
        return self.pace.slow


@pytest.fixture
def exchanges() -> Exchanges:
    return Exchanges()


QUICK = 0.5 * MESSAGE / SLOW_BYTES_PER_SECOND
SLOW = 2.0 * MESSAGE / SLOW_BYTES_PER_SECOND


def test_the_rate_decides(exchanges: Exchanges) -> None:
    assert not exchanges.pace.slow
    assert exchanges.make([SLOW] * 5)
    assert not exchanges.make([QUICK] * 5)


def test_waiting_for_the_first_message_does_not_count(exchanges: Exchanges) -> None:
    assert not exchanges.make([100.0] + [QUICK] * 4)


def test_few_bytes_change_nothing(exchanges: Exchanges) -> None:
    assert not exchanges.make([SLOW] * 4)
    assert exchanges.make([SLOW] * 5)
    assert exchanges.make([QUICK] * 4)
    assert exchanges.make([])
