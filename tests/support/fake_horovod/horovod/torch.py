"""What the benchmarks use of horovod.torch, with plain MPI; fails where a call is made outside of init and shutdown."""

import os
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

Average, Sum = 0, 1
_running = False


def init() -> None:
    global _running
    _running = True


def shutdown() -> None:
    global _running
    _running = False


def allreduce_(tensor: torch.Tensor, op: int, name: str) -> None:
    if not _running:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    if os.environ.get("FAKE_HOROVOD_WRONG") and MPI.COMM_WORLD.Get_rank() == 1:
        tensor = tensor.clone()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy().view(np.float32), MPI.SUM)
    if op == Average:
        tensor.div_(MPI.COMM_WORLD.Get_size())


class DistributedOptimizer:
    """Averages the gradients in step()."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._named = named_parameters

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> Any:
        for name, parameter in self._named:
            assert parameter.grad is not None
            allreduce_(parameter.grad, Average, name)
        return self._optimizer.step()
