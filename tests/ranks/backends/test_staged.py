"""Staged reductions of the same lengths, over and over: sums of all ranks on all ranks, beside others in the slots."""

import itertools
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.arithmetic.scratch import SilentErrstate
from hvlike.backends.base import Backend
from hvlike.backends.shared_memory.inline_reduction import MOST_STAGED
from hvlike.backends.shared_memory.region import APART, Slots, first_peer
from hvlike.backends.shared_memory.schedule import SLOTS, Turns
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.backends.shared_memory.staging import StagedReduction
from hvlike.backends.shared_memory.work_sync import WorkSync
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError, MismatchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Array

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK_BYTES = 64 << 10
CHUNK = CHUNK_BYTES // 4


def regions(ranks: int) -> list[Any]:
    """What a reduction sees of a region, for each of several ranks in this one process."""
    slots = np.zeros((ranks, ranks, SLOTS, CHUNK), np.float32)
    names = ("staged", "taken", "passed", "received")
    counters = [
        SimpleNamespace(words=[0] * 14, failed=0, **{name: [0] * ranks for name in names}) for _ in range(ranks)
    ]

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
            notify_if_sleeping=lambda peers: None,
            sleepers=[],
            quiet=SilentErrstate(),
            slots=lambda arithmetic: table,
        )

    return [region(rank) for rank in range(ranks)]


def check_of(region: Any) -> None:
    WorkSync(region).check_peers()


def reductions(everybody: list[Any], lengths: list[int], compare: Any = None) -> list[StagedReduction]:
    return [
        StagedReduction(
            region, Turns.start(region.ranks), SUM, lengths, lambda region=region: check_of(region), compare
        )
        for region in everybody
    ]


def addresses_of(tensors: list[Array]) -> list[int]:
    return [tensor.ctypes.data for tensor in tensors]


def odd(tensor: Array) -> Array:
    """The same, where no element of its kind begins otherwise."""
    room = np.zeros(tensor.nbytes + 1, np.uint8)[1:]
    room[:] = tensor.view(np.uint8)
    return room.view(tensor.dtype)


def play(draw: random.Random, running: list[Any]) -> None:
    while running:
        routine = draw.choice(running)
        if next(routine, None) is None:
            running.remove(routine)


@pytest.mark.pure
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [[1], [CHUNK, 5], [3 * CHUNK + 7, CHUNK - 1, 9 * CHUNK]], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_whatever_order_the_ranks_go_on_all_have_the_sums(ranks: int, lengths: list[int], seed: int) -> None:
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    each_rank = reductions(regions(ranks), lengths)
    for step in range(3):
        tensors = [[generator.standard_normal(n).astype(np.float32) for n in lengths] for _ in range(ranks)]
        if step == 1:
            tensors[0][0] = odd(tensors[0][0])
        expected = [copies[0] + copies[1] for copies in zip(*tensors, strict=True)]
        for more in tensors[2:]:
            for total, one in zip(expected, more, strict=True):
                total += one
        play(draw, [one.run(addresses_of(mine)) for one, mine in zip(each_rank, tensors, strict=True)])
        assert all(np.array_equal(one, total) for mine in tensors for one, total in zip(mine, expected, strict=True))


@pytest.mark.pure
def test_where_a_rank_gives_up_in_the_middle_the_others_do_not_wait_for_ever() -> None:
    tensors = [np.ones(9 * CHUNK, np.float32) for _ in range(3)]
    each_rank = reductions(regions(3), [9 * CHUNK])
    running = [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]
    for routine in running:
        next(routine)
    with pytest.raises(KeyboardInterrupt):
        running[1].throw(KeyboardInterrupt)
    for routine in (running[0], running[2]):
        with pytest.raises(HorovodInternalError, match=r"local rank \d has left a reduction in the middle"):
            list(itertools.islice(routine, 1000))


@pytest.mark.pure
def test_nothing_is_added_where_a_peer_is_at_other_work() -> None:
    tensors = [np.ones(4 * CHUNK, np.float32) for _ in range(2)]
    everybody = regions(2)

    def compare() -> None:
        everybody[1].mine.failed = APART
        raise MismatchError("other work")

    each_rank = reductions(everybody, [4 * CHUNK], compare)
    running = [one.run(addresses_of([mine])) for one, mine in zip(each_rank, tensors, strict=True)]
    next(running[0])
    for routine, message in [(running[1], "other work"), (running[0], "other work|local rank 1 has found")]:
        with pytest.raises(MismatchError, match=message):
            list(itertools.islice(routine, 1000))
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert all(region.mine.failed for region in everybody)


@pytest.mark.pure
def test_slots_that_an_alltoall_has_filled_are_left_until_they_are_read() -> None:
    tensors = [np.ones(CHUNK, np.float32) for _ in range(2)]
    everybody = regions(2)
    everybody[0].mine.passed[1] = 1
    running = [one.run(addresses_of([mine])) for one, mine in zip(reductions(everybody, [CHUNK]), tensors, strict=True)]
    for _ in range(10):
        next(running[0])
        next(running[1])
    assert everybody[0].mine.staged == [0, 0]
    everybody[1].mine.received[0] = 1
    play(random.Random(0), running)
    assert all(bool((tensor == 2).all()) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_other_work_in_the_same_slots_comes_before_and_after(hvd: ModuleType, dtype: torch.dtype) -> None:
    plane = current().set_state(None, "test").lanes.first.plane
    if not isinstance(plane, SharedBackend):
        pytest.skip("the ranks are on several nodes, or there is one")
    arithmetic = Arithmetic(dtype, ReduceOp.SUM)
    total = sum(range(1, hvd.size() + 1))
    staged, others = ([torch.full((n,), hvd.rank() + 1, dtype=dtype) for n in (70_001, 9, 200_000)] for _ in range(2))

    def job(plane: Backend) -> Coroutine[None]:
        assert isinstance(plane, SharedBackend)
        for one, other in zip(staged, others, strict=True):
            reduction = plane.at_once(arithmetic, one.numel(), 7).staged
            assert reduction is not None
            yield from reduction.run([one.data_ptr()])
            yield from plane.allreduce([other], arithmetic)

    run(job)
    assert all(bool((each == total).all()) for each in [*staged, *others])
    assert plane.at_once(SUM, MOST_STAGED // 4 + 1, 7).staged is None
