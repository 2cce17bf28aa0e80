"""Tensors of a bucket are reduced where they lie, short ones too; a rank that cannot leave them there does the same."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.op_queue import OpQueue, open_queue
from hvlike.backends.shared_memory import work_sync
from hvlike.backends.shared_memory.algorithm_choice import LEAST_MEAN, ROUNDS, AlgorithmChoice
from hvlike.backends.shared_memory.cma import CmaMemory, CmaReduction
from hvlike.backends.shared_memory.region import ADDRESSES
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.fusion.bucket_packer import BucketPacker
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine, Task

SHAPES = [(7,), (3, 5), (), (0, 2), (100, 150), (300, 400), *[(3 + 17 * index,) for index in range(300)]]
"""Short ones, a long one, a scalar and an empty one."""

pytestmark = pytest.mark.mpi(min_size=2)

STEPS = 2 * ROUNDS + 1
"""Both ways to reduce are tried in turn, and one is chosen."""


@pytest.fixture(autouse=True)
def _where_ranks_reach_each_other(reaching: bool) -> None:
    if not reaching:
        pytest.skip("the system does not let the ranks reach each other's memory")


@pytest.fixture
def _lane_without_reach(hvd: ModuleType) -> Iterator[None]:
    """Planned work of this test goes where no rank reaches another one's memory."""
    plane = shared_plane()
    memory = plane._fastest.memory
    plane._fastest.memory = CmaMemory([])
    yield
    plane._fastest.memory = memory


def contributions(rank: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.Tensor]:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + shift)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in SHAPES]


def expected(size: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.Tensor]:
    every = [contributions(rank, dtype, shift) for rank in range(size)]
    return [torch.stack(each).sum(0) for each in zip(*every, strict=True)]


def reduce(packer: BucketPacker, tensors: Sequence[torch.Tensor]) -> None:
    def job(plane: Backend) -> Coroutine[None]:
        yield from packer.allreduce(plane, tensors)

    run(job)


def equal(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def shared_plane() -> SharedBackend:
    plane = current().set_state(None, "test").lanes.first.plane
    assert isinstance(plane, SharedBackend)
    return plane


def memory_of() -> CmaMemory:
    return shared_plane()._fastest.memory


def new_lane(number: int) -> OpQueue:
    """A lane that may be lost."""
    fabric, group = current().fabric, current().set_state(None, "test").group
    opened = fabric.loop.start(open_queue(fabric, group, number), wake=False)
    assert fabric.loop.wait(lambda: opened.done, 30.0)
    assert opened.result is not None
    return opened.result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_every_tensor_is_reduced_step_after_step(hvd: ModuleType, dtype: torch.dtype) -> None:
    packer = BucketPacker([None] * len(SHAPES), Arithmetic(dtype, ReduceOp.SUM))
    for step in range(STEPS):
        tensors = contributions(hvd.rank(), dtype, step)
        addresses = [tensor.data_ptr() for tensor in tensors]
        reduce(packer, tensors)
        assert equal(tensors, expected(hvd.size(), dtype, step))
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert not packer._bundles


@pytest.mark.parametrize("chosen", [False, True], ids=["in the peers' memory", "staged"])
def test_all_ranks_take_the_way_that_was_faster_on_the_slowest(
    hvd: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    lane = new_lane(77_000 + chosen)
    assert isinstance(lane.plane, SharedBackend)
    lane.plane._fastest.memory._least = 1
    uses: list[bool] = []
    last = hvd.rank() == hvd.size() - 1

    def stage(self: AlgorithmChoice, addresses: list[int]) -> Coroutine[None]:
        uses.append(True)
        time.sleep(0.01 if last and not chosen else 0)
        return original(self, addresses)

    def reach(self: AlgorithmChoice, make: Callable[[], CmaReduction], number: int) -> Coroutine[None]:
        uses.append(False)
        time.sleep(0.01 if last and chosen else 0)
        return other(self, make, number)

    original, other = AlgorithmChoice._stage, AlgorithmChoice._reach
    monkeypatch.setattr(AlgorithmChoice, "_stage", stage)
    monkeypatch.setattr(AlgorithmChoice, "_reach", reach)
    packer = BucketPacker([None], Arithmetic(torch.float32, ReduceOp.SUM))
    for step in range(STEPS + 2):
        tensor = torch.full((300_000,), float(hvd.rank() + step))
        ended: list[Task[None]] = []
        lane.submit(lambda plane, tensor=tensor: packer.allreduce(plane, [tensor]), ended.append, wake=False)
        assert current().fabric.loop.wait(lambda ended=ended: bool(ended), 30.0)
        assert ended[0].error is None
        assert bool((tensor == sum(range(hvd.size())) + step * hvd.size()).all())
    assert uses == [False, True] * ROUNDS + [chosen] * 3


@pytest.mark.usefixtures("_lane_without_reach")
def test_where_ranks_do_not_reach_each_other_long_tensors_are_staged_as_they_are(hvd: ModuleType) -> None:
    shapes = [(300, 400), (7,), (200, 250)]
    assert sum(map(math.prod, shapes)) * 4 >= LEAST_MEAN * len(shapes)
    packer = BucketPacker([None] * 3, Arithmetic(torch.float32, ReduceOp.AVERAGE, divisor=hvd.size()))
    for step in range(3):
        tensors = [torch.full(shape, float(hvd.rank() + step)) for shape in shapes]
        reduce(packer, tensors)
        mean = step + (hvd.size() - 1) / 2
        assert all(bool((tensor == mean).all()) for tensor in tensors)
        assert packer._repeating is not None
    short = BucketPacker([None] * 400, Arithmetic(torch.float32, ReduceOp.SUM))
    reduce(short, [torch.ones(400) for _ in range(400)])
    assert short._repeating is None


@pytest.mark.parametrize("reach", [True, False])
def test_a_long_tensor_beside_a_short_one_goes_the_same_way_where_it_is_announced(
    hvd: ModuleType, request: pytest.FixtureRequest, reach: bool
) -> None:
    if not reach:
        request.getfixturevalue("_lane_without_reach")
    plane, total = shared_plane(), float(sum(range(hvd.size())))
    plane._fastest._known.clear()
    for _ in range(STEPS):
        tensors = [torch.full((n,), float(hvd.rank())) for n in (9, 300_001)]

        def announced(plane: Backend, tensors: list[torch.Tensor] = tensors) -> Coroutine[None]:
            yield from plane.allreduce(tensors, Arithmetic(torch.float32, ReduceOp.SUM))

        run(announced)
        assert all(bool((each == total).all()) for each in tensors)
    assert len(plane._fastest._known) == 1


def test_the_bits_are_those_of_bundles(hvd: ModuleType) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = [100 * torch.rand(shape, generator=generator) for shape in SHAPES]
    results = []
    for least in (1, 1 << 60):
        memory_of()._least = least
        packer = BucketPacker([None] * len(SHAPES), Arithmetic(torch.float32, ReduceOp.AVERAGE, divisor=hvd.size()))
        for _ in range(2):
            tensors = [each.clone() for each in inputs]
            reduce(packer, tensors)
            results.append(tensors)
    assert all(equal(results[0], each) for each in results[1:])


@pytest.mark.parametrize("strides", [None, (1, 3)], ids=["row by row", "transposed"])
def test_the_agreed_order_in_memory_counts(hvd: ModuleType, strides: tuple[int, int] | None) -> None:
    agreed = [strides if shape == (3, 5) else None for shape in SHAPES]
    packer = BucketPacker(agreed, Arithmetic(torch.float32, ReduceOp.SUM))
    for order in (hvd.rank() % 2, 0, 1, hvd.rank() % 2):
        tensors = contributions(hvd.rank())
        tensors[1] = tensors[1].t().contiguous().t() if order else tensors[1]
        reduce(packer, tensors)
        assert equal(tensors, expected(hvd.size()))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, of which memory holds the negatives."""
    return torch._neg_view(-tensor)


def inferred(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double()


@pytest.mark.parametrize("change", [negated, inferred, strided, wider])
def test_a_rank_whose_tensors_are_unusual_takes_part(
    hvd: ModuleType, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    packer = BucketPacker([None] * len(SHAPES), Arithmetic(torch.float32, ReduceOp.SUM))
    for step in range(STEPS):
        tensors = contributions(hvd.rank(), shift=step)
        if step and hvd.rank() == step % hvd.size():
            tensors = [change(tensor) for tensor in tensors]
        reduce(packer, tensors)
        assert equal([tensor.float() for tensor in tensors], expected(hvd.size(), shift=step))


@pytest.mark.parametrize("everybody", [True, False])
def test_some_tensors_lie_in_shared_allocations(hvd: ModuleType, everybody: bool) -> None:
    shared = hvd.empty_shared((300, 400), torch.float32)
    packer = BucketPacker([None] * len(SHAPES), Arithmetic(torch.float32, ReduceOp.SUM))
    place = SHAPES.index((300, 400))
    for step in range(4):
        tensors = contributions(hvd.rank(), shift=step)
        if everybody or hvd.rank() == 1:
            tensors[place] = shared.copy_(tensors[place])
        reduce(packer, tensors)
        assert equal(tensors, expected(hvd.size(), shift=step))


def test_tensors_of_other_dtypes_are_cast_in_bundles(hvd: ModuleType) -> None:
    packer = BucketPacker([None] * len(SHAPES), Arithmetic(torch.float16, ReduceOp.SUM), casts=True)
    for step in range(2):
        tensors = contributions(hvd.rank(), shift=step)
        reduce(packer, tensors)
        assert equal(tensors, expected(hvd.size(), shift=step))
        assert packer._bundles


def test_tensors_of_other_sizes_are_laid_out_anew(hvd: ModuleType) -> None:
    packer = BucketPacker([None, None], Arithmetic(torch.float32, ReduceOp.SUM))
    for lengths in ([5, 20_000], [20_000, 5], [7, 7], [3, 0]):
        tensors = [torch.full((length,), 1.0 + hvd.rank()) for length in lengths]
        reduce(packer, tensors)
        total = sum(1.0 + rank for rank in range(hvd.size()))
        assert all(bool((tensor == total).all()) for tensor in tensors)


def test_what_the_ranks_reach_into_is_kept_when_a_rank_gives_up(hvd: ModuleType) -> None:
    plane = new_lane(79_000).plane
    assert isinstance(plane, SharedBackend)
    plane._fastest.memory._least = 1
    repeated = plane.repeated([5], Arithmetic(torch.float32, ReduceOp.SUM))
    assert repeated is not None
    tensor, kept = torch.ones(5), len(work_sync.kept)
    routine = repeated.allreduce([tensor], [tensor.data_ptr()])
    next(routine)
    routine.close()
    assert len(work_sync.kept) == kept + 1
    # It stays: a peer may be about to write there.
    assert work_sync.kept[-1][0] is tensor


def test_more_tensors_than_can_be_said_are_not_taken(hvd: ModuleType) -> None:
    add = Arithmetic(torch.float32, ReduceOp.SUM)
    assert shared_plane().repeated([1] * ADDRESSES, add) is not None
    assert shared_plane().repeated([1] * (ADDRESSES + 1), add) is None


def test_ranks_with_other_tensors_are_told(hvd: ModuleType) -> None:
    fabric, lane = current().fabric, new_lane(78_000)
    assert isinstance(lane.plane, SharedBackend)
    lane.plane._fastest.memory._least = 1
    packer = BucketPacker([None, None], Arithmetic(torch.float32, ReduceOp.SUM))
    tensors = [torch.ones(each) for each in ([5, 6] if hvd.rank() else [5, 7])]
    ended: list[Task[None]] = []
    lane.submit(lambda plane: packer.allreduce(plane, tensors), ended.append, wake=False)
    assert fabric.loop.wait(lambda: bool(ended), 30.0)
    assert isinstance(ended[0].error, MismatchError)
