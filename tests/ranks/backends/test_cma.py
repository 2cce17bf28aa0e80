"""Reductions in the ranks' own memory: every chunk by one rank, in the order of the ranks, with the bits of staging."""

from types import ModuleType

import pytest
import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.transport.loop.coroutine import Coroutine

SUM = Arithmetic(torch.float32, ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_the_bits_are_those_of_staging(hvd: ModuleType, reaching: bool, dtype: torch.dtype) -> None:
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
