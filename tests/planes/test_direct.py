"""Reductions without staging: every chunk by one rank, in the order of the ranks; right on several nodes too."""

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from planes.jobs import run

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.direct import Direct, DirectReduction, Place, place_word
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.planes.region import Region
from hvlike.transport.allocations import Allocation, Allocations, spread
from hvlike.transport.routine import Routine
from hvlike.transport.segment import Segment

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
        reduction = DirectReduction(cast("Region", Node(rank, words)), SUM, cast("Any", copies), first_owner)
        reduction.begin(5)
        while reduction.unfinished:
            reduction.advance()
    for each, total in zip(copies, expected, strict=True):
        assert all(np.array_equal(copy, total) for copy in each)


def allocated(table: Allocations, number: int, ranks: tuple[int, ...]) -> tuple[Allocation, torch.Tensor]:
    made = Allocation((0, number), ranks, ranks[0], 400, Segment.private(len(ranks) * spread(400)))
    return made, torch.from_numpy(table.add(made, np.dtype(np.float32)))


def test_tensors_are_known_by_where_they_lie() -> None:
    table = Allocations()
    first, tensor = allocated(table, 1, (0, 1, 2))
    others, of_others = allocated(table, 2, (0, 2))
    plane = Direct(table, [0, 1])
    found = plane.places([torch.ones(5), tensor[10:20], of_others, tensor[:0], tensor])
    assert found == {1: Place(first, 40), 4: Place(first, 0)}
    assert Direct(table, [0, 2]).places([of_others]) == {0: Place(others, 0)}
    assert Direct(Allocations(), [0, 1]).places([tensor]) == {}


def test_copies_are_the_same_place_on_each_rank() -> None:
    table = Allocations()
    made, _tensor = allocated(table, 1, (0, 1, 2))
    for rank in range(3):
        made.copy(rank).view(np.float32)[:] = np.arange(100) + 1000 * rank
    copies = Direct(table, [0, 1, 2]).copies(Place(made, 40), 12, SUM)
    assert [copy.tolist() for copy in copies] == [[10, 11, 12], [1010, 1011, 1012], [2010, 2011, 2012]]


def test_the_word_tells_places_apart() -> None:
    table = Allocations()
    (first, _one), (second, _two) = allocated(table, 1, (0, 1)), allocated(table, 2, (0, 1))
    words = [
        place_word(places)
        for places in (
            {},
            {0: Place(first, 0)},
            {1: Place(first, 0)},
            {0: Place(first, 4)},
            {0: Place(second, 0)},
            {0: Place(first, 0), 1: Place(first, 4)},
        )
    ]
    assert words[0] == 0
    assert len(set(words)) == len(words)
    assert all(0 <= word < 1 << 64 for word in words)


def test_on_any_plane(hvd: ModuleType, ranks_per_node: int | None) -> None:
    tensor = hvd.empty_shared(3 * 65536 + 5).fill_(hvd.rank() + 1)
    other = hvd.empty_shared(40).fill_(hvd.rank() + 1)

    def job(plane: Plane) -> Routine[None]:
        yield from plane.allreduce([tensor, torch.ones(70_000), other], SUM)

    run(job)
    total = sum(range(1, hvd.size() + 1))
    assert tensor.eq(total).all()
    assert other.eq(total).all()
    assert hvd.allreduce_(other, op=hvd.Average, name="other").eq(total).all()
