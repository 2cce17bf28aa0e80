"""Gradients of leaves go into a map of the context, and never into `.grad`."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor


def accumulate(gradients: dict[Tensor, Tensor], leaf: Tensor, gradient: Tensor, sole: bool) -> None:
    """Add a gradient to those of the context, in place where there is one already; a sparse one stays sparse.

    gradient: of the leaf's shape; sole: nobody else refers to it or its memory, so it may be kept as it is.
    """
    if gradient.requires_grad:
        gradient = gradient.detach()
    before = gradients.get(leaf)
    if before is None:
        gradients[leaf] = gradient if sole and _lies_like(gradient, leaf) else _copy(gradient, leaf)
    elif before.layout is not torch.strided and gradient.layout is torch.strided:
        # Sparse memory cannot take a dense sum.
        gradients[leaf] = gradient + before
    else:
        before.add_(gradient)


def is_sole(tensor: Tensor) -> bool:
    """Whether a variable of the caller is all that refers to the tensor and to its memory; False where unsure."""
    if tensor.layout is not torch.strided:
        return False
    if not tensor._is_view():
        return _counts(tensor) == _sole_counts()
    # Most gradients of weights: the product that the engine has made, seen transposed.
    return _covers(tensor) and _counts_of_view(tensor) == _sole_counts_of_view()


def _covers(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory: a part would keep the rest alive."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _counts(tensor: Any) -> tuple[int, int, int]:
    """How many refer to the Python object, to the tensor behind it, to its memory; with those that ask."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)


def _counts_of_view(tensor: Any) -> tuple[tuple[int, int, int], ...]:
    """The same for a view, and for the tensor that it is a view of."""
    base = tensor._base
    return _counts(tensor), _counts(base)


@cache
def _sole_counts() -> tuple[int, int, int]:
    """What is counted when nobody else refers to it; depends on the interpreter."""
    seen = []

    def ask(tensor: Tensor) -> None:
        seen.append(_counts(tensor))

    tensor = torch.empty(1, device="cpu")
    ask(tensor)
    return seen[0]


@cache
def _sole_counts_of_view() -> tuple[tuple[int, int, int], ...]:
    """The same for a view that is all that refers to its base."""
    seen = []

    def ask(tensor: Tensor) -> None:
        seen.append(_counts_of_view(tensor))

    tensor = torch.empty(1, device="cpu").t()
    ask(tensor)
    return seen[0]


def _lies_like(gradient: Tensor, leaf: Tensor) -> bool:
    return gradient.stride() == leaf.stride() and gradient.dtype is leaf.dtype


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A gradient of its own, with the leaf's strides where they can be kept."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, device=gradient.device, requires_grad=False).copy_(gradient)
