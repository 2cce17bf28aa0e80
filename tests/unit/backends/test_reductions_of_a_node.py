"""Reductions through shared memory, without staging, and in the peers' memory: every chunk once, ranks in order."""

import itertools
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from support.backends.node import addresses_of, odd, on_all, play, regions

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.cma import (
    CROWDED_LEAST_WORK,
    LEAST_WORK,
    PASSES,
    SHORT_MEAN,
    CmaMemory,
    CmaReduction,
)
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.region import ADDRESSES, Region
from hvlike.backends.shared_memory.schedule import CHUNK_BYTES, Chunk, assign, deal
from hvlike.backends.shared_memory.staging import Results, StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.errors import HorovodInternalError, MismatchError
from hvlike.system.mapped_memory import Segment
from hvlike.transport.memory.allocations import Allocation, Allocations, spread
from hvlike.transport.memory.process_memory import MOST_RANGES

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK = (64 << 10) // 4
LONG_CHUNK = CHUNK_BYTES // 4


def reductions(
    everybody: list[Region],
    chunks: list[Chunk],
    results: Results = Results.TO_ALL,
    stamps: list[int] | None = None,
) -> list[StagedReduction]:
    """One for each rank; stamps: what each posts before, to be compared."""

    def make(region: Region) -> StagedReduction:
        sync = WorkSync(region)
        if stamps is not None:
            sync.begin(stamps[region.rank], 0)
        return StagedReduction(sync, SUM, chunks, results, compares=stamps is not None)

    return on_all(everybody, make)


def contributions(ranks: int, lengths: list[int], seed: int) -> tuple[list[list[Any]], list[Any]]:
    """Tensors of each rank, and their sums in the order of the ranks."""
    generator = np.random.default_rng(seed)
    tensors = [[generator.standard_normal(n).astype(np.float32) for n in lengths] for _ in range(ranks)]
    sums = [copies[0] + copies[1] for copies in zip(*tensors, strict=True)]
    for more in tensors[2:]:
        for total, one in zip(sums, more, strict=True):
            total += one
    return tensors, sums


def run_alone(each_rank: list[StagedReduction], tensors: list[Any]) -> list[Any]:
    """Each rank begins with one tensor."""
    return [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "lengths",
    [[1], [CHUNK, 5], [3 * CHUNK + 7, CHUNK - 1, 9 * CHUNK], [5, 900, 17] * 40],
    ids=["one element", "two", "long ones", "short ones"],
)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_whatever_order_the_ranks_go_on_all_have_the_sums(ranks: int, lengths: list[int], seed: int) -> None:
    draw = random.Random(seed)
    each_rank = reductions(regions(ranks), deal(lengths, ranks, CHUNK, 4096, short=1000))
    for step in range(3):
        tensors, expected = contributions(ranks, lengths, 10 * seed + step)
        if step == 1:
            tensors[0][0] = odd(tensors[0][0])
        play(draw, [one.run(addresses_of(mine)) for one, mine in zip(each_rank, tensors, strict=True)])
        assert all(np.array_equal(one, total) for mine in tensors for one, total in zip(mine, expected, strict=True))


@pytest.mark.parametrize("results", [Results.TO_OWNER, Results.PARTIAL])
@pytest.mark.parametrize("ranks", [2, 3])
def test_only_the_owner_is_given_the_result(ranks: int, results: Results) -> None:
    lengths = [2 * CHUNK + 3, 5, CHUNK]
    owners = [1, 0, ranks - 1]
    each_rank = reductions(regions(ranks), assign(lengths, owners, CHUNK), results)
    for step in range(3):
        tensors, expected = contributions(ranks, lengths, step)
        before = [[each.copy() for each in mine] for mine in tensors]
        play(random.Random(step), [one.run(addresses_of(mine)) for one, mine in zip(each_rank, tensors, strict=True)])
        for rank, mine in enumerate(tensors):
            for index, owner in enumerate(owners):
                assert np.array_equal(mine[index], expected[index] if owner == rank else before[rank][index])


def test_where_a_rank_gives_up_in_the_middle_the_others_do_not_wait_for_ever() -> None:
    tensors = [np.ones(9 * CHUNK, np.float32) for _ in range(3)]
    each_rank = reductions(regions(3), deal([9 * CHUNK], 3, CHUNK, 1, short=1))
    running = run_alone(each_rank, tensors)
    for coroutine in running:
        next(coroutine)
    with pytest.raises(KeyboardInterrupt):
        running[1].throw(KeyboardInterrupt)
    for coroutine in (running[0], running[2]):
        with pytest.raises(HorovodInternalError, match=r"local rank \d has left a collective before its end"):
            list(itertools.islice(coroutine, 1000))


def test_nothing_is_added_where_a_peer_is_at_other_work() -> None:
    tensors = [np.ones(4 * CHUNK, np.float32) for _ in range(2)]
    each_rank = reductions(regions(2), deal([4 * CHUNK], 2, CHUNK, 1, short=1), stamps=[3, 4])
    running = run_alone(each_rank, tensors)
    for coroutine in reversed(running):
        with pytest.raises(MismatchError, match=r"another operation|has found that"):
            list(itertools.islice(coroutine, 1000))
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_slots_that_an_alltoall_has_filled_are_left_until_they_are_read() -> None:
    tensors = [np.ones(CHUNK, np.float32) for _ in range(2)]
    everybody = regions(2)
    everybody[0].mine.passed[1] = 1
    each_rank = reductions(everybody, deal([CHUNK], 2, CHUNK, 1, short=1))
    running = run_alone(each_rank, tensors)
    for _ in range(10):
        next(running[0])
        next(running[1])
    assert list(everybody[0].mine.staged) == [0, 0]
    everybody[1].mine.received[0] = 1
    play(random.Random(0), running)
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def complete(reductions: Iterable[InPlaceReduction | CmaReduction]) -> None:
    """One rank after the other, each as much as it can."""
    for reduction in reductions:
        reduction.begin(5)
        while reduction.unfinished:
            reduction.advance()


@pytest.mark.parametrize("lengths", [[1], [16], [17], [5, 100, 16], [16 * 3 * 40 + 3]], ids=str)
@pytest.mark.parametrize("first_owner", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_without_staging_every_chunk_is_reduced_once(ranks: int, first_owner: int, lengths: list[int]) -> None:
    tensors, expected = contributions(ranks, lengths, 1)
    copies: list[Any] = list(zip(*tensors, strict=True))
    complete(InPlaceReduction(region, SUM, copies, first_owner) for region in regions(ranks, 64))
    for each, total in zip(copies, expected, strict=True):
        assert all(np.array_equal(copy, total) for copy in each)


def allocated(table: Allocations, number: int, ranks: tuple[int, ...]) -> tuple[Allocation, torch.Tensor]:
    made = Allocation((0, number), ranks, ranks[0], 400, Segment.private(len(ranks) * spread(400)))
    return made, torch.from_numpy(table.add(made, np.dtype(np.float32)))


def places(table: Allocations, ranks: list[int], tensors: list[torch.Tensor]) -> dict[int, AllocationPlace]:
    return SharedAllocations(table, ranks).places(
        [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]
    )


def test_tensors_are_known_by_where_they_lie() -> None:
    table = Allocations()
    first, tensor = allocated(table, 1, (0, 1, 2))
    others, of_others = allocated(table, 2, (0, 2))
    found = places(table, [0, 1], [torch.ones(5), tensor[10:20], of_others, tensor[:0], tensor])
    assert found == {1: AllocationPlace(first, 40), 4: AllocationPlace(first, 0)}
    assert places(table, [0, 2], [of_others]) == {0: AllocationPlace(others, 0)}
    assert places(Allocations(), [0, 1], [tensor]) == {}


def test_copies_are_the_same_place_on_each_rank() -> None:
    table = Allocations()
    made, _tensor = allocated(table, 1, (0, 1, 2))
    for rank in range(3):
        made.copy(rank).view(np.float32)[:] = np.arange(100) + 1000 * rank
    copies = SharedAllocations(table, [0, 1, 2]).copies(AllocationPlace(made, 40), 12, SUM)
    assert [copy.tolist() for copy in copies] == [[10, 11, 12], [1010, 1011, 1012], [2010, 2011, 2012]]


def test_the_word_tells_places_apart() -> None:
    table = Allocations()
    (first, _one), (second, _two) = allocated(table, 1, (0, 1)), allocated(table, 2, (0, 1))
    words = [
        place_word(places)
        for places in (
            {},
            {0: AllocationPlace(first, 0)},
            {1: AllocationPlace(first, 0)},
            {0: AllocationPlace(first, 4)},
            {0: AllocationPlace(second, 0)},
            {0: AllocationPlace(first, 0), 1: AllocationPlace(first, 4)},
        )
    ]
    assert words[0] == 0
    assert len(set(words)) == len(words)
    assert all(0 <= word < 1 << 64 for word in words)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([1], id="one element"),
        pytest.param([LONG_CHUNK], id="one chunk"),
        pytest.param([LONG_CHUNK + 1], id="a chunk and an element"),
        pytest.param([5, 3 * LONG_CHUNK, 70], id="short and long ones"),
        pytest.param([LONG_CHUNK * PASSES * 7 + 3], id="many chunks"),
        pytest.param([1 + index % 7 for index in range(MOST_RANGES + 5)], id="more short ones than a chunk takes"),
        pytest.param([3 * LONG_CHUNK // 16] * 40, id="several chunks of short ones"),
    ],
)
@pytest.mark.parametrize("place", [np.copy, odd], ids=["aligned", "at odd addresses"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_the_memory_of_peers_every_chunk_is_reduced_once(ranks: int, place: Any, lengths: list[int]) -> None:
    tensors, expected = contributions(ranks, lengths, 1)
    copies = [list(map(place, mine)) for mine in tensors]
    everybody, memory = regions(ranks), CmaMemory([os.getpid()] * ranks)
    each_rank = [CmaReduction(region, memory, SUM, lengths) for region in everybody]
    for reduction, mine in zip(each_rank, copies, strict=True):
        reduction.post(addresses_of(mine))
    complete(each_rank)
    for mine in copies:
        assert all(np.array_equal(each, total) for each, total in zip(mine, expected, strict=True))


@pytest.mark.parametrize(
    ("sizes", "crowded", "expected"),
    [
        ([LEAST_WORK // 128] * 128, False, True),
        ([LEAST_WORK // 128 - 1] * 128, False, False),
        ([SHORT_MEAN] * 100, False, False),
        ([1, 4 * SHORT_MEAN, *[1] * 20, LEAST_WORK], False, True),
        ([LEAST_WORK // 128] * 128, True, False),
        ([CROWDED_LEAST_WORK // 1024] * 1024, True, True),
        ([1 << 10] * (ADDRESSES + 1), False, False),
    ],
)
def test_only_much_work_of_short_tensors_is_done_in_the_peers_memory(
    sizes: list[int], crowded: bool, expected: bool
) -> None:
    assert CmaMemory([1, 2], crowded=crowded).suits(sizes) is expected
    assert not CmaMemory([]).suits(sizes)
