"""Jobs of an OpQueue on every backend: many in flight, one after the other, whatever they are."""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.op_queue import open_queue
from hvlike.backends.shared_memory.schedule import CHUNK_BYTES
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.persistent.bucket import BucketPacker
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine, Wait

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    return (torch.randn(length, generator=generator) * 8).to(dtype)


def test_the_backend_is_the_one_for_the_topology(hvd: ModuleType, ranks_per_node: int | None) -> None:
    backend = current().find_set(None, "test").queues.first.backend
    if hvd.size() == 1:
        return
    several_nodes = ranks_per_node is not None and hvd.size() > ranks_per_node
    assert isinstance(backend, HierarchicalBackend if several_nodes else SharedBackend)
    assert hvd.local_size() <= (ranks_per_node or hvd.size())


def test_jobs_run_one_by_one_in_the_order_they_came(hvd: ModuleType, ranks_per_node: int | None) -> None:
    queue = current().find_set(None, "test").queues.first
    tensors = [torch.full((1 + 997 * number,), float(number)) for number in range(30)]
    order: list[int] = []
    for number, tensor in enumerate(tensors):
        operation = queue.run(
            lambda backend, tensor=tensor: backend.allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM)),
            wake=True,
        )
        operation.then(lambda _, number=number: order.append(number))
    assert current().fabric.loop.wait(lambda: len(order) == 30, 60.0)
    assert order == list(range(30))
    assert queue.idle
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number * hvd.size()).all())
    hvd.barrier()


def test_a_sum_does_not_depend_on_how_the_work_was_cut(hvd: ModuleType, ranks_per_node: int | None) -> None:
    if ranks_per_node is not None:
        pytest.skip("across nodes the order of a sum follows from the lengths")
    whole = values(hvd.rank(), 150_000, torch.float32)
    parts = [part.clone() for part in whole.split([7, 70_000, 79_993])]
    for _ in range(hvd.size()):  # whoever owns the first chunk
        again = whole.clone()
        run(lambda backend, again=again: backend.allreduce([again], Arithmetic(torch.float32, ReduceOp.SUM)))
    run(lambda backend: backend.allreduce(parts, Arithmetic(torch.float32, ReduceOp.SUM)))
    assert torch.equal(torch.cat(parts), again)


SUM = Arithmetic(torch.float32, ReduceOp.SUM)


@pytest.mark.parametrize("work", [0, 5], ids=["alone", "beside a reduction"])
def test_all_ranks_hear_how_many_are_active(hvd: ModuleType, ranks_per_node: int | None, work: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    heard = []

    def job(backend: Backend) -> Coroutine[None]:
        for census in range(6):
            for _ in range((rank + census) % 3):
                yield Wait.AGAIN
            if work:
                tensor = torch.ones(work)
                yield from backend.allreduce([tensor], SUM)
                assert torch.equal(tensor, torch.full((work,), float(size)))
            heard.append((yield from backend.count_active(rank >= census)))

    run(job)
    assert heard == [max(size - census, 0) for census in range(6)]


LENGTHS = {
    "only to the next": lambda source, target: 500_000 if target == source + 1 else 0,
    "several chunks": lambda source, target: 300_000 * (1 + source) + 77 * target,
}


def content(source: int, target: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * source + target)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def pairs(hvd: ModuleType, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank sends to each and what it must receive from each."""
    me, length = hvd.rank(), LENGTHS[kind]
    sends = [content(me, other, length(me, other)) for other in range(hvd.size())]
    return sends, [content(other, me, length(other, me)) for other in range(hvd.size())]


def test_an_alltoall_between_reductions_and_gathers(hvd: ModuleType, ranks_per_node: int | None) -> None:
    """They share the staging slots: nothing may be overwritten before it was taken, whoever is ahead."""
    arithmetic = Arithmetic(torch.float32, ReduceOp.SUM)
    for round_number in range(6):
        sends, expected = pairs(hvd, "several chunks" if round_number % 2 else "only to the next")
        receives = [torch.zeros_like(each) for each in expected]
        before = torch.full((200_000 + round_number,), float(hvd.rank()))
        after = torch.full((3 + 150_000 * (round_number % 3),), 1.0)
        shown = torch.full((100_000,), hvd.rank(), dtype=torch.uint8)

        def job(
            backend: Backend,
            before: torch.Tensor = before,
            after: torch.Tensor = after,
            shown: torch.Tensor = shown,
            sends: list[torch.Tensor] = sends,
            receives: list[torch.Tensor] = receives,
        ) -> Coroutine[None]:
            yield from backend.allreduce([before], arithmetic)
            yield from backend.alltoall(sends, receives)
            yield from backend.allreduce([after], arithmetic)
            yield from backend.gather([shown], [hvd.size() - 1])

        run(job)
        assert bool((before == sum(range(hvd.size()))).all())
        assert bool((after == hvd.size()).all())
        assert bool((shown == hvd.size() - 1).all())
        for received, right in zip(receives, expected, strict=True):
            assert torch.equal(received, right)


def test_tensors_of_shared_allocations_are_reduced_on_any_backend(hvd: ModuleType, ranks_per_node: int | None) -> None:
    tensor = hvd.empty_shared(3 * 65536 + 5).fill_(hvd.rank() + 1)
    other = hvd.empty_shared(40).fill_(hvd.rank() + 1)

    def job(backend: Backend) -> Coroutine[None]:
        yield from backend.allreduce([tensor, torch.ones(70_000), other], SUM)

    run(job)
    total = sum(range(1, hvd.size() + 1))
    assert tensor.eq(total).all()
    assert other.eq(total).all()
    assert hvd.allreduce_(other, op=hvd.Average, name="other").eq(total).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_the_bits_of_the_ranks_own_memory_are_those_of_staging(
    hvd: ModuleType, reaching: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = [(100 * torch.rand(n, generator=generator)).to(dtype) for n in (*range(400, 440), 9, 30_001)]
    average = Arithmetic(dtype, ReduceOp.AVERAGE, divisor=hvd.size())
    results = []
    for within_reach in (True, False):
        tensors = [each.clone() for each in inputs]

        def job(
            backend: Backend, tensors: list[torch.Tensor] = tensors, far: bool = not within_reach
        ) -> Coroutine[None]:
            if reaching and far and isinstance(backend, SharedBackend):
                backend.memory.least_bytes = 1 << 60
            yield from backend.allreduce(tensors, average)

        run(job)
        results.append(tensors)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(hvd.broadcast(results[0][-1], 0, name="bits"), results[0][-1])


def test_an_average_of_large_half_numbers_does_not_overflow(hvd: ModuleType, ranks_per_node: int | None) -> None:
    arithmetic = Arithmetic(torch.float16, ReduceOp.AVERAGE, divisor=hvd.size())
    tensors = [torch.full((1000,), 60000.0, dtype=torch.float16) for _ in range(hvd.size())]
    run(lambda backend: backend.reduce_scatter(tensors, list(range(hvd.size())), arithmetic))
    assert bool((tensors[hvd.rank()] == 60000.0).all())


def test_a_rank_that_owns_nothing_does_not_run_ahead(hvd: ModuleType, ranks_per_node: int | None) -> None:
    """Its third stamp once replaced the first before that was compared, which looked like other work."""
    arithmetic = Arithmetic(torch.float32, ReduceOp.SUM)
    every = [[torch.full((length,), 1.0)] for length in range(1, 40)]

    def job(backend: Backend) -> Coroutine[None]:
        for tensors in every:
            yield from backend.reduce_scatter(tensors, [0], arithmetic)

    run(job)
    if hvd.rank() == 0:
        assert all(bool((tensor == hvd.size()).all()) for (tensor,) in every)


SHAPES = [(7,), (3, 5), (), (100, 150), (0, 2), (16_000,), (60_000,), *[(2_000 + 17 * index,) for index in range(60)]]
"""More than a chunk of small ones, one large one, an empty one and a scalar."""


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, None)],
    ids=["float32", "as float16", "bfloat16"],
)
def test_every_tensor_is_reduced(
    hvd: ModuleType, ranks_per_node: int | None, dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    rank, size = hvd.rank(), hvd.size()
    arithmetic = Arithmetic(wire or dtype, ReduceOp.SUM, prescale=0.5, postscale=4.0)
    assert sum(torch.Size(shape).numel() for shape in SHAPES) * arithmetic.itemsize > CHUNK_BYTES
    packer = BucketPacker([None] * len(SHAPES), arithmetic)
    for step in range(2):
        tensors = [contribution(rank + step, shape, dtype) for shape in SHAPES]
        # Another order in memory on every second rank: the agreed one is row by row.
        tensors[3] = tensors[3].t().contiguous().t() if rank % 2 else tensors[3]

        def job(backend: Backend, tensors: list[torch.Tensor] = tensors) -> Coroutine[None]:
            yield from packer.allreduce(backend, tensors, active=True)

        run(job)
        for tensor, shape in zip(tensors, SHAPES, strict=True):
            expected = torch.stack([contribution(each + step, shape, torch.float64) for each in range(size)]).sum(0)
            assert torch.equal(tensor.double(), 2.0 * expected)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_tensors_are_told(hvd: ModuleType, ranks_per_node: int | None) -> None:
    if ranks_per_node is not None:
        pytest.skip("only ranks of one node compare")
    fabric, group = current().fabric, current().find_set(None, "test").group
    opened = fabric.loop.start(open_queue(fabric, group, 77_000), wake=False)
    assert fabric.loop.wait(lambda: opened.done, 30.0)
    queue = opened.result
    assert queue is not None
    lengths = [5, 6] if hvd.rank() else [5, 7]
    packer = BucketPacker([None, None], Arithmetic(torch.float32, ReduceOp.SUM))
    operation = queue.run(lambda backend: packer.allreduce(backend, list(map(torch.ones, lengths)), active=True))
    assert fabric.loop.wait(operation.done, 30.0)
    assert isinstance(operation.error, MismatchError)
