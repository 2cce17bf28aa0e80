"""Modules of several kinds, and what all ranks together give them."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Uses of three layers those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used:
            x = self.layers[name](x).tanh()
        return x


@dataclass
class Result:
    """What a module may return."""

    value: Tensor
    rest: dict[str, list[Tensor]]
    name: str = "result"


class Heads(nn.Module):
    """Returns several tensors in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 4)
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Result:
        inner = self.body(x)
        return Result(self.first(inner), {"more": [self.second(inner), inner.detach()]})


class Shared(nn.Module):
    """One weight in two layers, one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x).tanh()).tanh())


def inputs(step: int = 0, samples: int = 12) -> Tensor:
    """Inputs of all ranks together, (samples, 4)."""
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(100 + step))


def share(hvd: ModuleType, batch: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return batch[hvd.rank() :: hvd.size()]


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradients of a module."""
    return [parameter.grad for parameter in module.parameters()]


def assert_same(first: Iterable[Tensor | None], second: Iterable[Tensor | None]) -> None:
    """The two lists hold the same tensors, but for rounding."""
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
