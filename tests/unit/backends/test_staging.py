"""Staged reductions of the same lengths, over and over: right sums, in whatever order the ranks go on."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.backends.node import addresses_of, odd, on_all, play, regions

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.schedule import Chunk, assign, deal
from hvlike.backends.shared_memory.staging import Results, StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.errors import HorovodInternalError, MismatchError

pytestmark = pytest.mark.pure

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK = (64 << 10) // 4


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


@pytest.mark.parametrize("seed", range(4))
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
    running = [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]
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
    running = [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]
    for coroutine in reversed(running):
        with pytest.raises(MismatchError, match=r"another operation|has found that"):
            list(itertools.islice(coroutine, 1000))
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_slots_that_an_alltoall_has_filled_are_left_until_they_are_read() -> None:
    tensors = [np.ones(CHUNK, np.float32) for _ in range(2)]
    everybody = regions(2)
    everybody[0].mine.passed[1] = 1
    each_rank = reductions(everybody, deal([CHUNK], 2, CHUNK, 1, short=1))
    running = [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]
    for _ in range(10):
        next(running[0])
        next(running[1])
    assert list(everybody[0].mine.staged) == [0, 0]
    everybody[1].mine.received[0] = 1
    play(random.Random(0), running)
    assert all(bool((tensor == 2).all()) for tensor in tensors)
