"""A rank is the first to touch its own slots: the system takes their pages from the domain on which it runs then."""

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.backends.node import addresses_of, play, regions

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.schedule import deal
from hvlike.backends.shared_memory.staging import Results, StagedReduction
from hvlike.backends.shared_memory.transfer import alltoall, gather_at_once
from hvlike.backends.shared_memory.work_sync import WorkSync

CHUNK = 64 << 10
FAR = CmaMemory([])  # The ranks do not reach each other's memory: all goes through the slots


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
        chunks = deal([300_000, 5, 20_000], region.ranks, CHUNK // 4, 4096, short=1000)
        tensors = [np.ones(length, np.float32) for length in (300_000, 5, 20_000)]
        reduction = StagedReduction(WorkSync(region), arithmetic, chunks, results, compares=False)
        yield from reduction.run(addresses_of(tensors))

    return run


def bring_to_all(region: Region) -> Iterator[Any]:
    tensors = [torch.ones(9 * CHUNK, dtype=torch.uint8) for _ in range(region.ranks)]
    return gather_at_once(WorkSync(region), FAR, tensors, list(range(region.ranks)))


def exchange(region: Region) -> Iterator[Any]:
    sends, receives = ([torch.ones(5 * CHUNK, dtype=torch.uint8) for _ in range(region.ranks)] for _ in range(2))
    return alltoall(WorkSync(region), FAR, sends, receives)


@pytest.mark.parametrize(
    "work",
    [*map(reduce, Results), bring_to_all, exchange],
    ids=[*(f"reduction to {results.value}" for results in Results), "gather", "alltoall"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_pages_of_slots_are_taken_by_the_rank_whose_slots_they_are(
    ranks: int, work: Callable[[Region], Iterator[Any]]
) -> None:
    everybody = regions(ranks, CHUNK)
    pages = [pages_of(everybody[0], rank) for rank in range(ranks)]
    assert not resident(set().union(*pages))
    play(random.Random(ranks), [watched(region, work(region), pages) for region in everybody])
    assert all(resident(own) for own in pages)


def test_it_is_noticed_when_a_rank_looks_into_the_slots_of_another_before() -> None:
    everybody = regions(2, CHUNK)
    pages = [pages_of(everybody[0], rank) for rank in range(2)]

    def look(region: Region) -> Iterator[Any]:
        int(region.byte_slots(1 - region.rank, region.rank)[0][CHUNK // 2])
        yield

    with pytest.raises(AssertionError):
        play(random.Random(0), [watched(region, look(region), pages) for region in everybody])
