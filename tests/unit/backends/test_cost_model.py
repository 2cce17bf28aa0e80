"""Which way reductions across nodes take, by what they cost after the model."""

import math
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


def test_many_ranks_double_what_is_small_and_halve_what_is_large() -> None:
    assert choose(FAST, 1024, KIB) == Way(sharded=False, levels=(2,) * 10)
    assert choose(FAST, 1024, 64 * MIB) == Way(sharded=True, levels=(2,) * 10)
    assert choose(FAST, 1000, 64 * MIB) == Way(sharded=True, levels=(2, 2, 2, 5, 5, 5))


def test_sums_of_16_bit_floats_are_twice_as_large_so_more_ranks_send_to_all() -> None:
    assert choose(VETH, 4, 64 * KIB).levels == (2, 2)
    assert choose(VETH, 4, 64 * KIB, widened=2).levels == (4,)


def test_on_a_long_way_one_level_takes_the_place_of_several() -> None:
    assert choose(FAR, 8, KIB) == Way(sharded=False, levels=(8,))
    assert choose(FAR, 8, 64 * MIB) == Way(sharded=True, levels=(8,))
    assert choose(FAR, 1024, KIB) == Way(sharded=False, levels=(32, 32))


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
