"""Reductions without staging: every chunk by one rank, in the order of the ranks; right on several nodes too."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.in_place_shm import AllocationPlace, InPlaceReduction, SharedAllocations, place_word
from hvlike.backends.shared_memory.region import Region
from hvlike.system.mapped_memory import Segment
from hvlike.transport.memory.allocations import Allocation, Allocations, spread

pytestmark = pytest.mark.pure

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK = 64


class Node:
    """As much of a region as a reduction without staging looks at."""

    chunk = CHUNK

    def __init__(self, rank: int, words: list[list[int]]) -> None:
        self.rank, self.ranks = rank, len(words)
        self.counters = [SimpleNamespace(words=each) for each in words]
        self.mine = self.counters[rank]

    def fence(self) -> None:
        """One thread needs none."""


@pytest.mark.parametrize("lengths", [[1], [16], [17], [5, 100, 16], [16 * 3 * 40 + 3]], ids=str)
@pytest.mark.parametrize("first_owner", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_chunk_is_reduced_once(ranks: int, first_owner: int, lengths: list[int]) -> None:
    generator = np.random.default_rng(1)
    copies = [[generator.standard_normal(n).astype(np.float32) for _ in range(ranks)] for n in lengths]
    expected = [each[0] + each[1] for each in copies]
    for total, each in zip(expected, copies, strict=True):
        for more in each[2:]:
            total += more
    words = [[0] * 16 for _ in range(ranks)]
    for rank in range(ranks):
        reduction = InPlaceReduction(cast("Region", Node(rank, words)), SUM, cast("Any", copies), first_owner)
        reduction.begin(5)
        while reduction.unfinished:
            reduction.advance()
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
