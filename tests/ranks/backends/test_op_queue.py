"""OpQueues on every backend: many jobs in flight, one after the other.

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
