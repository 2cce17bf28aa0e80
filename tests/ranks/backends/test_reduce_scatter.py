"""reduce_scatter on every backend: each tensor reduced where it is wanted, everything else only read."""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.network import pairwise_reduction
from hvlike.transport.loop.coroutine import Coroutine


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    return torch.randint(0, 4, (length,), generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        *((torch.float32, each) for each in ([0], [1], [7, 0, 3], [65_537, 5, 1], [300_000, 1, 70_000, 200_000])),
        *((dtype, [65_537, 5, 1]) for dtype in (torch.bfloat16, torch.int64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("first_owner", [0, 1])
def test_each_tensor_on_its_owner(
    hvd: ModuleType,
    ranks_per_node: int | None,
    lengths: list[int],
    dtype: torch.dtype,
    first_owner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, nbytes in {"SHORT_BYTES": 1024, "FIRST_BYTES": 512, "LARGEST_PACKET": 4096}.items():
        monkeypatch.setattr(pairwise_reduction, name, nbytes)
    arithmetic = Arithmetic(dtype, ReduceOp.SUM, prescale=2.0, postscale=0.5)
    owners = [(first_owner + index) % hvd.size() for index in range(len(lengths))]
    for _ in range(2):
        tensors = [values(hvd.rank(), length, dtype) for length in lengths]
        kept = [tensor.clone() for tensor in tensors]
        run(lambda backend, tensors=tensors: backend.reduce_scatter(tensors, owners, arithmetic))
        for tensor, before, owner in zip(tensors, kept, owners, strict=True):
            total = sum(values(rank, len(tensor), dtype).double() for rank in range(hvd.size()))
            assert torch.equal(tensor, torch.as_tensor(total).to(dtype) if owner == hvd.rank() else before)


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
