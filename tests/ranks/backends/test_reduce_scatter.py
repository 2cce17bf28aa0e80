"""reduce_scatter on every backend, beside the values of the model."""

from types import ModuleType

import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.transport.loop.coroutine import Coroutine


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
