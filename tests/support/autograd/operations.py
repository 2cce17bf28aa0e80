"""What the steps of random programs compute: on square matrices of float64, so that everything fits everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SIDE = 3
_MASK = torch.eye(SIDE, dtype=torch.bool)
_ROWS = torch.tensor([2, 0, 2])


@dataclass(frozen=True)
class Operation:
    """An operation out of place, and what a generator must know to combine it with others."""

    run: Callable[..., Any]
    inputs: int = 1
    outputs: int = 1
    weight: int = 4
    keeps: bool = False
    """Its backward looks at its inputs or outputs: none of them may be changed in place later."""
    shares: bool = False
    """Its outputs lie in the memory of its first input."""
    grads: bool = True
    """Its outputs require grad when one of its inputs does."""


@dataclass(frozen=True)
class Change:
    """An operation in place on its first argument."""

    run: Callable[..., Any]
    inputs: int = 0
    """Further ones."""
    keeps: bool = False


class SumAndDifference(torch.autograd.Function):
    """A function written in Python with two outputs."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left + right, left - right

    @staticmethod
    def backward(ctx: Any, total: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        return total + difference, total - difference


class OnlyTheFirst(torch.autograd.Function):
    """A sum that gives its second input no gradient at all."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _without_grad(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value * 0.5


def _recomputed(left: Tensor, right: Tensor) -> Any:
    return checkpoint(lambda a, b: torch.tanh(a @ b) * a, left, right, use_reentrant=False, preserve_rng_state=False)


OPERATIONS = {
    "add": Operation(lambda a, b: a + b, 2, weight=8),
    "subtract": Operation(lambda a, b: a - 0.5 * b, 2),
    "copy": Operation(lambda a: a.clone(), weight=6),
    "negate": Operation(lambda a: -a),
    "multiply": Operation(lambda a, b: a * b, 2, keeps=True, weight=8),
    "matmul": Operation(lambda a, b: 0.5 * (a @ b), 2, keeps=True),
    "addmm": Operation(lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=0.5), 3, keeps=True),
    "tanh": Operation(torch.tanh, keeps=True),
    "sine": Operation(torch.sin, keeps=True),
    "where": Operation(lambda a, b: torch.where(_MASK, a, b), 2),
    "rotate": Operation(lambda a, b: (torch.complex(a, b) * (0.6 + 0.8j)).imag, 2, shares=False, keeps=True, weight=2),
    "transpose": Operation(lambda a: a.t(), shares=True),
    "views": Operation(lambda a: a.unsqueeze(0)[:, :, :].squeeze(0), shares=True),
    "unbind": Operation(lambda a, b: torch.stack([a, b]).unbind(), 2, 2, keeps=True),
    "chunk": Operation(lambda a, b: torch.cat([a, b.t()]).chunk(2), 2, 2, keeps=True),
    "sort": Operation(lambda a: a.sort(dim=0).values, keeps=True, weight=2),
    "sum and difference": Operation(SumAndDifference.apply, 2, 2),
    "only the first": Operation(OnlyTheFirst.apply, 2, weight=1),
    "recomputed": Operation(_recomputed, 2, keeps=True, weight=1),
    "detach": Operation(lambda a: a.detach().clone(), weight=1, grads=False),
    "without grad": Operation(_without_grad, weight=1, grads=False),
}


def lookup(table: Tensor) -> Tensor:
    """Rows of a table, whose gradient is sparse."""
    return torch.nn.functional.embedding(_ROWS, table, sparse=True)


def _change_a_row(value: Tensor, other: Tensor) -> None:
    value[1].add_(other[0])


def _set_a_corner(value: Tensor, other: Tensor) -> None:
    value[:2, 1:] = other[1:, :2]


CHANGES = {
    "add_": Change(lambda a, b: a.add_(b), 1),
    "halve_": Change(lambda a: a.mul_(0.5)),
    "multiply_": Change(lambda a, b: a.mul_(b), 1, keeps=True),
    "tanh_": Change(lambda a: a.tanh_(), keeps=True),
    "change a row": Change(_change_a_row, 1),
    "set a corner": Change(_set_a_corner, 1),
}


def bend(gradient: Tensor | None) -> Tensor | None:
    """A hook that is not linear: called with parts of a gradient, its results do not add up to the right one."""
    return None if gradient is None else gradient + 0.3 * torch.sin(gradient)
