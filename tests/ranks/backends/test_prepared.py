"""Tensors of a bucket are reduced where they lie, short ones too; a rank that cannot leave them there does the same."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.op_queue import OpQueue, open_queue
from hvlike.backends.shared_memory.cma import CmaMemory
from hvlike.backends.shared_memory.region import ADDRESSES
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.persistent.bucket import BucketPacker
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.never_freed import ABANDONED_REDUCTION, kept_forever

SHAPES = [(7,), (3, 5), (), (0, 2), (100, 150), (300, 400), *[(3 + 17 * index,) for index in range(300)]]
"""Short ones, a long one, a scalar and an empty one."""

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]

STEPS = 4


@pytest.fixture(autouse=True)
def _where_ranks_reach_each_other(reaching: bool) -> None:
    if not reaching:
        pytest.skip("the system does not let the ranks reach each other's memory")


@pytest.fixture
def _queue_without_reach(hvd: ModuleType) -> Iterator[None]:
    """Planned work of this test goes where no rank reaches another one's memory."""
    backend = shared_backend()
    memory = backend.memory
    backend.memory = CmaMemory([])
    yield
    backend.memory = memory


def contributions(rank: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.Tensor]:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + shift)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in SHAPES]


def expected(size: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.Tensor]:
    every = [contributions(rank, dtype, shift) for rank in range(size)]
    return [torch.stack(each).sum(0) for each in zip(*every, strict=True)]


def reduce(packer: BucketPacker, tensors: Sequence[torch.Tensor]) -> None:
    def job(backend: Backend) -> Coroutine[None]:
        yield from packer.allreduce(backend, tensors, active=True)

    run(job)


def equal(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def shared_backend() -> SharedBackend:
    backend = current().find_set(None, "test").queues.first.backend
    assert isinstance(backend, SharedBackend)
    return backend


def new_queue(number: int) -> OpQueue:
    """A queue that may be lost."""
    fabric, group = current().fabric, current().find_set(None, "test").group
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


@pytest.mark.usefixtures("_queue_without_reach")
def test_where_ranks_do_not_reach_each_other_long_tensors_are_staged_as_they_are(hvd: ModuleType) -> None:
    shapes = [(300, 400), (7,), (200, 250)]
    packer = BucketPacker([None] * 3, Arithmetic(torch.float32, ReduceOp.AVERAGE, divisor=hvd.size()))
    for step in range(3):
        tensors = [torch.full(shape, float(hvd.rank() + step)) for shape in shapes]
        reduce(packer, tensors)
        mean = step + (hvd.size() - 1) / 2
        assert all(bool((tensor == mean).all()) for tensor in tensors)


@pytest.mark.parametrize("active", [0, 1])
def test_a_run_says_how_many_ranks_are_active(hvd: ModuleType, active: int) -> None:
    for lengths in ([5], [300_000, 7], [3] * 400):
        prepared = shared_backend().prepare(lengths, Arithmetic(torch.float32, ReduceOp.SUM))
        for step in range(4):
            tensors = [torch.full((length,), 1.0) for length in lengths]
            counts: list[int] = []

            mine = hvd.rank() % 2 == (active + step) % 2
            coroutine = prepared.run([tensor.data_ptr() for tensor in tensors], mine, tensors)

            def job(
                backend: Backend, coroutine: Coroutine[int] = coroutine, counts: list[int] = counts
            ) -> Coroutine[None]:
                counts.append((yield from coroutine))

            run(job)
            assert counts == [sum(rank % 2 == (active + step) % 2 for rank in range(hvd.size()))]
            assert all(bool((tensor == hvd.size()).all()) for tensor in tensors)


def test_the_bits_are_the_same_staged_and_in_the_peers_memory(hvd: ModuleType) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = [100 * torch.rand(shape, generator=generator) for shape in SHAPES]
    results = []
    for least in (1, 1 << 60):
        shared_backend().memory.least_bytes = least
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


def test_tensors_of_other_sizes_are_laid_out_anew(hvd: ModuleType) -> None:
    packer = BucketPacker([None, None], Arithmetic(torch.float32, ReduceOp.SUM))
    for lengths in ([5, 20_000], [20_000, 5], [7, 7], [3, 0]):
        tensors = [torch.full((length,), 1.0 + hvd.rank()) for length in lengths]
        reduce(packer, tensors)
        total = sum(1.0 + rank for rank in range(hvd.size()))
        assert all(bool((tensor == total).all()) for tensor in tensors)


def test_what_the_ranks_reach_into_is_kept_when_a_rank_gives_up(hvd: ModuleType) -> None:
    backend = new_queue(79_000).backend
    assert isinstance(backend, SharedBackend)
    backend.memory.least_bytes = 1
    prepared = backend.prepare([5], Arithmetic(torch.float32, ReduceOp.SUM))
    tensor, kept = torch.ones(5), len(kept_forever(ABANDONED_REDUCTION))
    coroutine = prepared.run([tensor.data_ptr()], True, [tensor])
    next(coroutine)
    coroutine.close()
    assert len(kept_forever(ABANDONED_REDUCTION)) == kept + 1
    # It stays: a peer may be about to write there.
    assert kept_forever(ABANDONED_REDUCTION)[-1] is tensor


def test_more_tensors_than_a_rank_can_post_are_staged(hvd: ModuleType) -> None:
    packer = BucketPacker([None] * (ADDRESSES + 1), Arithmetic(torch.float32, ReduceOp.SUM))
    tensors = [torch.ones(1) for _ in range(ADDRESSES + 1)]
    reduce(packer, tensors)
    assert all(tensor.item() == hvd.size() for tensor in tensors)


def test_ranks_with_other_tensors_are_told(hvd: ModuleType) -> None:
    fabric, queue = current().fabric, new_queue(78_000)
    assert isinstance(queue.backend, SharedBackend)
    queue.backend.memory.least_bytes = 1
    packer = BucketPacker([None, None], Arithmetic(torch.float32, ReduceOp.SUM))
    tensors = [torch.ones(each) for each in ([5, 6] if hvd.rank() else [5, 7])]
    operation = queue.run(lambda backend: packer.allreduce(backend, tensors, active=True))
    assert fabric.loop.wait(operation.done, 30.0)
    assert isinstance(operation.error, MismatchError)
