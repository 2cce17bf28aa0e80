"""Bytes through the slots of a region: every chunk arrives once, in order, whoever goes on first.

A rank is the first to touch its own slots: the system takes their pages from the domain on which it runs then.
"""

import ctypes
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.backends.node import addresses_of, play, regions

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory import transfer
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.schedule import deal
from hvlike.backends.shared_memory.staging import Results, StagedReduction
from hvlike.backends.shared_memory.transfer import alltoall, gather, gather_at_once, is_read
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.errors import HorovodInternalError, MismatchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.never_freed import ABANDONED_REDUCTION, kept_forever

CHUNK = 4096
LONG_CHUNK = 64 << 10


def noise(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reach(ranks: int, far: bool) -> CmaMemory:
    """All ranks are this process; far: they do not reach each other."""
    return CmaMemory([] if far else [os.getpid()] * ranks)


@pytest.fixture(params=["through the slots", "where it lies"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What is longer than some 3 KiB is read where it lies, or all goes through the slots."""
    monkeypatch.setattr(transfer, "GATHER_READ_BYTES", 3000)
    monkeypatch.setattr(transfer, "ALLTOALL_READ_BYTES", 3000)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 10_000)
    return request.param == "through the slots"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_an_owner_has_all_have(ranks: int, seed: int, far: bool) -> None:
    syncs, draw = [WorkSync(region) for region in regions(ranks, CHUNK)], random.Random(seed)
    for step in range(4):
        lengths = [[9 * CHUNK + 5, 0, 3, CHUNK, *[100] * 90], [5, 0], [7 * CHUNK] * ranks][step % 3]
        owners = [(step + index) % ranks for index in range(len(lengths))]
        expected = [noise(length, 100 * step + index) for index, length in enumerate(lengths)]
        each = [
            [
                value.clone() if owner == rank else torch.zeros_like(value)
                for value, owner in zip(expected, owners, strict=True)
            ]
            for rank in range(ranks)
        ]
        memory = reach(ranks, far)
        as_parts = step == 3
        play(
            draw,
            [
                gather(sync, list(zip(mine, owners, strict=True)))
                if as_parts
                else gather_at_once(sync, memory, mine, owners)
                for sync, mine in zip(syncs, each, strict=True)
            ],
        )
        assert all(torch.equal(one, value) for mine in each for one, value in zip(mine, expected, strict=True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_everybody_has_what_was_sent_to_it(ranks: int, seed: int, far: bool) -> None:
    syncs, draw = [WorkSync(region) for region in regions(ranks, CHUNK)], random.Random(seed)
    for step in range(3):
        lengths = [[(5 * CHUNK * (a + 2 * b + step)) % 30011 for b in range(ranks)] for a in range(ranks)]
        sends = [[noise(length, 7 * a + b) for b, length in enumerate(lengths[a])] for a in range(ranks)]
        receives = [[torch.zeros(lengths[a][b], dtype=torch.uint8) for a in range(ranks)] for b in range(ranks)]
        memory = reach(ranks, far)
        play(
            draw,
            [alltoall(sync, memory, sends[rank], receives[rank]) for rank, sync in enumerate(syncs)],
        )
        assert all(torch.equal(receives[b][a], sends[a][b]) for a in range(ranks) for b in range(ranks))


def test_an_alltoall_leaves_slots_in_which_a_reduction_is_under_way() -> None:
    everybody = regions(2, CHUNK)
    sends = [torch.ones(5, dtype=torch.uint8) for _ in range(2)]
    everybody[0].turns[1] += 1
    received = [torch.zeros(5, dtype=torch.uint8) for _ in range(2)]
    running = alltoall(WorkSync(everybody[0]), reach(2, far=True), sends, received)
    for _ in range(5):
        next(running)
    assert list(everybody[0].mine.passed) == [0, 0]
    everybody[1].mine.words[0] = 1
    next(running)
    assert list(everybody[0].mine.passed) == [0, 0]
    everybody[1].mine.taken[1] = everybody[0].mine.taken[1] = 1
    next(running)
    assert list(everybody[0].mine.passed) == [0, 1]


@pytest.mark.parametrize(
    ("lengths", "owners", "expected"),
    [
        pytest.param([1 << 20] * 2, [0, 1], True, id="as much of each"),
        pytest.param([1 << 18] * 2, [0, 1], False, id="little"),
        pytest.param([1 << 24], [0], False, id="from one to all"),
        pytest.param([1 << 24, 1 << 20], [0, 1], False, id="nearly all from one"),
        pytest.param([0, 0], [0, 1], False, id="nothing"),
    ],
)
def test_what_is_read_where_it_lies(lengths: list[int], owners: list[int], expected: bool) -> None:
    assert is_read(lengths, owners) is expected


def other_calls(kind: str, sync: WorkSync, memory: CmaMemory) -> Coroutine[None]:
    """Rank 1 calls something else than rank 0."""
    rank = sync.region.rank
    size = 5000 + rank if kind == "other lengths" else 5000
    tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    if kind == "other kinds" and rank:
        return gather_at_once(sync, memory, tensors, [0, 1])
    if kind == "other owners":
        return gather_at_once(sync, memory, tensors, [rank, rank])
    return alltoall(sync, memory, tensors, [each.clone() for each in tensors])


@pytest.mark.parametrize("kind", ["other lengths", "other owners", "other kinds"])
def test_ranks_that_call_other_things_are_told(kind: str, far: bool) -> None:
    syncs = [WorkSync(region) for region in regions(2, CHUNK)]
    first, second = (other_calls(kind, sync, reach(2, far)) for sync in syncs)
    next(first)
    for rank, running in [(1, second), (0, first)]:
        with pytest.raises(MismatchError, match=rf"local rank {rank}: |different operations"):
            list(itertools.islice(running, 50))


def test_who_interrupts_a_transfer_ends_it_for_all(far: bool) -> None:
    """Peers may read from it: its tensors stay."""
    syncs, before = [WorkSync(region) for region in regions(2, CHUNK)], len(kept_forever(ABANDONED_REDUCTION))
    tensors = [torch.zeros(9 * CHUNK, dtype=torch.uint8) for _ in range(2)]
    first, second = (gather_at_once(sync, reach(2, far), tensors, [0, 1]) for sync in syncs)
    next(first)
    with pytest.raises(KeyboardInterrupt):
        first.throw(KeyboardInterrupt())
    with pytest.raises(HorovodInternalError, match="local rank 0 has left"):
        list(itertools.islice(second, 50))
    kept = {id(each) for each in kept_forever(ABANDONED_REDUCTION)[before:]}
    assert kept == (set() if far else {id(each) for each in tensors})


def pages_of(region: Region, rank: int) -> set[int]:
    """The numbers of the pages that hold nothing but slots of this rank, which lie one after another."""
    slots = [slot for owner in range(region.ranks) for slot in region.byte_slots(rank, owner)]
    first, last = slots[0].ctypes.data, slots[-1].ctypes.data + slots[-1].nbytes
    return set(range(-(-first // mmap.PAGESIZE), last // mmap.PAGESIZE))


def resident(pages: set[int]) -> set[int]:
    """Those of them that the system has given."""
    first, count = min(pages), max(pages) - min(pages) + 1
    told = (ctypes.c_ubyte * count)()
    start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(start, length, told) == 0
    return {page for page in pages if told[page - first] & 1}


def watched(region: Region, coroutine: Iterator[Any], pages: list[set[int]]) -> Iterator[Any]:
    """Advance a rank, and make sure after each step that it has not taken a page of another one."""
    everything = set().union(*pages)
    while True:
        before = resident(everything)
        try:
            waits = next(coroutine)
        except StopIteration:
            return
        finally:
            taken = resident(everything) - before
            assert taken <= pages[region.rank]
        yield waits


def reduce(results: Results) -> Callable[[Region], Iterator[Any]]:
    def run(region: Region) -> Iterator[Any]:
        arithmetic = Arithmetic(torch.float32, ReduceOp.SUM)
        chunks = deal([300_000, 5, 20_000], region.ranks, LONG_CHUNK // 4, 4096, short=1000)
        tensors = [np.ones(length, np.float32) for length in (300_000, 5, 20_000)]
        reduction = StagedReduction(WorkSync(region), arithmetic, chunks, results, compares=False)
        yield from reduction.run(addresses_of(tensors))

    return run


def bring_to_all(region: Region) -> Iterator[Any]:
    tensors = [torch.ones(9 * LONG_CHUNK, dtype=torch.uint8) for _ in range(region.ranks)]
    return gather_at_once(WorkSync(region), reach(region.ranks, far=True), tensors, list(range(region.ranks)))


def exchange(region: Region) -> Iterator[Any]:
    sends, receives = ([torch.ones(5 * LONG_CHUNK, dtype=torch.uint8) for _ in range(region.ranks)] for _ in range(2))
    return alltoall(WorkSync(region), reach(region.ranks, far=True), sends, receives)


@pytest.mark.parametrize(
    "work",
    [*map(reduce, Results), bring_to_all, exchange],
    ids=[*(f"reduction to {results.value}" for results in Results), "gather", "alltoall"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_pages_of_slots_are_taken_by_the_rank_whose_slots_they_are(
    ranks: int, work: Callable[[Region], Iterator[Any]]
) -> None:
    everybody = regions(ranks, LONG_CHUNK)
    pages = [pages_of(everybody[0], rank) for rank in range(ranks)]
    assert not resident(set().union(*pages))
    play(random.Random(ranks), [watched(region, work(region), pages) for region in everybody])
    assert all(resident(own) for own in pages)


def test_it_is_noticed_when_a_rank_looks_into_the_slots_of_another_before() -> None:
    everybody = regions(2, LONG_CHUNK)
    pages = [pages_of(everybody[0], rank) for rank in range(2)]

    def look(region: Region) -> Iterator[Any]:
        int(region.byte_slots(1 - region.rank, region.rank)[0][LONG_CHUNK // 2])
        yield

    with pytest.raises(AssertionError):
        play(random.Random(0), [watched(region, look(region), pages) for region in everybody])
