"""Whether the contestants of bench step do the work that is timed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvlike.bench.trainers import Trainer
from hvlike.bench.workloads import Batch
from hvlike.errors import HvlikeError
from hvlike.transport.raw import RawMpi

# Sums of a few ranks' float32 values in different orders.
_TOLERANCE = 1e-4


def expected_gradients(model: nn.Module, batch: Batch, raw: RawMpi) -> list[Tensor]:
    """Return the means over ranks of the gradients of a model before its first step, by plain MPI. Collective."""
    model(*batch).backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is None:
            raise HvlikeError("A model of the benchmark has a parameter without a gradient.")
        mean = parameter.grad.cpu()
        raw.allreduce(mean.numpy())
        gradients.append(mean.div_(raw.size).to(parameter.device))
    return gradients


def verify_gradients(trainer: Trainer, expected: list[Tensor], rank: int) -> None:
    """Compare the gradients that the first step has left with the expected ones. Raises: HvlikeError."""
    for index, (parameter, right) in enumerate(zip(trainer.parameters, expected, strict=True)):
        found = parameter.grad
        # Relative to the largest element: small ones are what large ones leave when they cancel.
        allowed = _TOLERANCE * float(right.abs().max())
        if found is None or not torch.allclose(found, right, rtol=0.0, atol=allowed):
            raise HvlikeError(
                f"rank {rank}: {trainer.name} did not leave the mean gradient in parameter {index} "
                f"of shape {tuple(parameter.shape)}."
            )


def verify_replicas(trainer: Trainer, raw: RawMpi) -> None:
    """Check that all ranks have trained to the same weights. Collective. Raises: HvlikeError on every rank."""
    mine = trainer.checksum()
    highest, lowest = raw.maximum([mine, -mine])
    if highest != -lowest:
        raise HvlikeError(f"{trainer.name} left different weights on different ranks: {-lowest} to {highest}.")
