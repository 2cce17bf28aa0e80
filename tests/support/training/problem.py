"""A small regression problem, the same on every rank: models, whole batches, and this rank's share of them."""

from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor, nn

from hvlike.collectives.api.gather_scatter import allgather

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
    # Written out: torch 2.5 has no mse_loss of bfloat16 on CPU.
    return (model(batch[0]) - batch[1]).square().mean()


def same_on_all_ranks(tensors: Iterable[Tensor]) -> bool:
    """True if every rank has bitwise the same values."""
    mine = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    everybody = allgather(mine).reshape(-1, mine.numel())
    return bool((everybody == mine).all())


def largest_difference(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """The largest absolute difference of two lists of tensors."""
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(first, second, strict=True))
