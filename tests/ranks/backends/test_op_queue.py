"""OpQueues on every backend: right sums, bitwise alike on all ranks, any dtype, many jobs in flight.

The ranks of this machine are also grouped into pretended nodes, so that the network and hierarchical backends run too.
"""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.session.context import current


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


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        *((torch.float32, each) for each in ([1], [7, 0, 3], [65_536], [65_537, 5], [400_000, 1, 70_000])),
        *((each, [65_537, 5]) for each in (torch.float64, torch.bfloat16, torch.float16, torch.int64)),
    ],
    ids=str,
)
def test_sums_are_right_and_bitwise_alike(
    hvd: ModuleType, ranks_per_node: int | None, dtype: torch.dtype, lengths: list[int]
) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0.0)
    for _ in range(2):
        tensors = [values(hvd.rank(), length, dtype) for length in lengths]
        run(lambda backend, tensors=tensors: backend.allreduce(tensors, Arithmetic(dtype, ReduceOp.SUM)))
        for tensor, length in zip(tensors, lengths, strict=True):
            expected = sum(values(rank, length, dtype).double() for rank in range(hvd.size()))
            # Between nodes a 16-bit sum of one node is rounded once more.
            torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=tolerance * 24)
            first = hvd.broadcast(tensor, 0)
            assert torch.equal(first, tensor)


def test_factors_apply_once_whatever_the_way(hvd: ModuleType, ranks_per_node: int | None) -> None:
    arithmetic = Arithmetic(torch.float32, ReduceOp.AVERAGE, divisor=hvd.size(), prescale=0.5, postscale=3.0)
    tensors = [torch.full((300_000,), 4.0), torch.full((3,), 4.0)]
    run(lambda backend: backend.allreduce(tensors, arithmetic))
    for tensor in tensors:
        torch.testing.assert_close(tensor, torch.full_like(tensor, 6.0))


@pytest.mark.parametrize("length", [0, 5, 1_000_003])
def test_gather_brings_every_owners_bytes_to_all(hvd: ModuleType, ranks_per_node: int | None, length: int) -> None:
    owners = [*range(hvd.size()), 0]
    tensors = [
        torch.full((length + index,), index if owner == hvd.rank() else 255, dtype=torch.uint8)
        for index, owner in enumerate(owners)
    ]
    run(lambda backend: backend.gather(tensors, owners))
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((length + index,), index, dtype=torch.uint8))


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
