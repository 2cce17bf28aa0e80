"""Small tensors are reduced in bundles, wherever the backend takes them, as if each were reduced by itself."""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.op_queue import open_queue
from hvlike.backends.shared_memory.schedule import CHUNK_BYTES
from hvlike.collectives.persistent.bucket import BucketPacker
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine

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
