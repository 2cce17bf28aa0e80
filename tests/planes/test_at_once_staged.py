"""Staged reductions with everything prepared: sums of all ranks on all ranks, beside others in the same slots."""

import itertools
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planes.jobs import run

from hvlike.collectives.context import current
from hvlike.errors import MismatchError
from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.at_once_staged import MOST_BYTES, StagedReduction
from hvlike.planes.chunks import SLOTS, Turns
from hvlike.planes.ops import ReduceOp
from hvlike.planes.plane import Plane
from hvlike.planes.quiet import Quiet
from hvlike.planes.region import Slots, first_peer
from hvlike.planes.shared import SharedPlane
from hvlike.transport.routine import Routine

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK_BYTES = 64 << 10
CHUNK = CHUNK_BYTES // 4


def regions(ranks: int) -> list[Any]:
    """What a reduction sees of a region, for each of several ranks in this one process."""
    slots = np.zeros((ranks, ranks, SLOTS, CHUNK), np.float32)
    counters = [SimpleNamespace(words=[0] * 13, staged=[0] * ranks, taken=[0] * ranks, failed=0) for _ in range(ranks)]

    def region(rank: int) -> Any:
        peers = [peer for peer in range(ranks) if peer != rank]
        table = Slots(
            [list(slots[rank, owner]) for owner in range(ranks)],
            [[slots[peer, rank, turn] for peer in peers] for turn in range(SLOTS)],
            [list(slots[first_peer(owner), owner]) for owner in range(ranks)],
        )
        return SimpleNamespace(
            rank=rank,
            ranks=ranks,
            peers=peers,
            chunk=CHUNK_BYTES,
            crowded=True,
            counters=counters,
            mine=counters[rank],
            others=[counters[peer] for peer in peers],
            order=lambda: None,
            nudge=lambda peers: None,
            sleepers=[],
            quiet=Quiet(),
            slots=lambda arithmetic: table,
        )

    return [region(rank) for rank in range(ranks)]


def check_of(region: Any) -> None:
    if any(each.failed for each in region.others):
        raise MismatchError("a peer has given up")


def reductions(everybody: list[Any], tensors: list[np.ndarray[Any, Any]]) -> list[StagedReduction]:
    return [
        StagedReduction(region, region.turns, SUM, tensor, lambda region=region: check_of(region))
        for region, tensor in zip(everybody, tensors, strict=True)
    ]


@pytest.mark.pure
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [[1], [CHUNK, 5], [3 * CHUNK + 7, CHUNK - 1, 9 * CHUNK]], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_whatever_order_the_ranks_go_on_all_have_the_sum(ranks: int, lengths: list[int], seed: int) -> None:
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    everybody = regions(ranks)
    for region in everybody:
        region.turns = Turns.start(ranks)
    for length in lengths * 2:
        tensors = [generator.standard_normal(length).astype(np.float32) for _ in range(ranks)]
        expected = tensors[0] + tensors[1]
        for more in tensors[2:]:
            expected += more
        running = [each.run() for each in reductions(everybody, tensors)]
        while running:
            routine = draw.choice(running)
            if next(routine, None) is None:
                running.remove(routine)
        assert all(np.array_equal(tensor, expected) for tensor in tensors)


@pytest.mark.pure
def test_where_a_rank_gives_up_in_the_middle_the_others_do_not_wait_for_ever() -> None:
    everybody = regions(3)
    for region in everybody:
        region.turns = Turns.start(3)
    running = [each.run() for each in reductions(everybody, [np.ones(9 * CHUNK, np.float32) for _ in range(3)])]
    for routine in running:
        next(routine)
    with pytest.raises(KeyboardInterrupt):
        running[1].throw(KeyboardInterrupt)
    for routine in (running[0], running[2]):
        with pytest.raises(MismatchError, match="given up"):
            list(itertools.islice(routine, 1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_other_work_in_the_same_slots_comes_before_and_after(hvd: ModuleType, dtype: torch.dtype) -> None:
    plane = current().membership(None, "test").lanes.first.plane
    if not isinstance(plane, SharedPlane):
        pytest.skip("the ranks are on several nodes, or there is one")
    arithmetic = Arithmetic(dtype, ReduceOp.SUM)
    total = sum(range(1, hvd.size() + 1))
    staged, others = ([torch.full((n,), hvd.rank() + 1, dtype=dtype) for n in (70_001, 9, 200_000)] for _ in range(2))

    def job(plane: Plane) -> Routine[None]:
        assert isinstance(plane, SharedPlane)
        for one, other in zip(staged, others, strict=True):
            reduction = plane.at_once(arithmetic, one.numel(), 7).staged(one.data_ptr())
            assert reduction is not None
            yield from reduction.run()
            yield from plane.allreduce([other], arithmetic)

    run(job)
    assert all(bool((each == total).all()) for each in [*staged, *others])
    assert plane.at_once(SUM, MOST_BYTES // 4 + 1, 7).staged(0) is None
