"""A small regression problem, the same on every rank: models, whole batches, and this rank's share of them."""

from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor, nn

SAMPLES = 36
"""Divisible by 1, 2, 3 and 4 ranks, and each share again by 3 passes: all parts have the same weight."""


def make_model(seed: int = 0) -> nn.Module:
    """A model with the same weights wherever the seed is the same."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def whole_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, torch.randn(SAMPLES, 3, generator=generator)


def share(hvd: ModuleType, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part of a whole batch."""
    inputs, targets = batch
    return inputs[hvd.rank() :: hvd.size()], targets[hvd.rank() :: hvd.size()]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error on a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def same_on_all_ranks(tensors: Iterable[Tensor]) -> bool:
    """True if every rank has bitwise the same values."""
    from hvlike.collectives.objects import allgather_object

    everybody = allgather_object([tensor.detach().clone() for tensor in tensors])
    return all(
        torch.equal(mine, other) for rank in everybody for mine, other in zip(everybody[0], rank, strict=True)
    )


def largest_difference(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """The largest absolute difference of two lists of tensors."""
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(first, second, strict=True))
