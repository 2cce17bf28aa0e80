"""Gradients of leaves: added to the map of a context, never to `.grad`, with the hooks of the AccumulateGrad node.

The engine only captures the gradient of a leaf and does not run its AccumulateGrad node, so its hooks run here:

    hooks of the leaf (tensor.register_hook)        run by the engine
    node.register_prehook                           run here, may change the gradient
    the gradient is added to the map of the context
    node.register_hook                              run here

Hooks of `register_post_accumulate_grad_hook` wait for `.grad` to change and are not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hvlike.errors import RpcError


def accumulate(gradients: dict[Tensor, Tensor], leaf: Tensor, gradient: Tensor, sole: bool) -> None:
    """Add a gradient to those of the context, in place where there is one. A sparse one stays sparse.

    sole: nothing else refers to the gradient or its memory, so it may be kept as it is.
    """
    if gradient.requires_grad:
        gradient = gradient.detach()
    before = gradients.get(leaf)
    if before is None:
        fits = sole and gradient.stride() == leaf.stride() and gradient.dtype is leaf.dtype
        gradients[leaf] = gradient if fits else _copy(gradient, leaf)
    elif before.layout is not torch.strided and gradient.layout is torch.strided:
        # Sparse memory cannot take a dense sum.
        gradients[leaf] = gradient + before
    else:
        before.add_(gradient)


def is_sole(tensor: Tensor) -> bool:
    """Whether one variable of the caller is all that refers to the tensor and its memory. False where unsure."""
    if tensor.layout is not torch.strided:
        return False
    is_view = tensor._is_view()
    # Most gradients of weights are views: the product that the engine has made, transposed. A view of a part of its
    # memory would keep the rest alive.
    if is_view and tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    return _reference_counts(tensor, is_view) == _sole_counts(is_view)


def _reference_counts(tensor: Any, is_view: bool) -> list[int]:
    """Count the references, of this call too, to object, tensor and memory; for a view those to its base too."""
    counts = []
    for each in (tensor, tensor._base) if is_view else (tensor,):
        storage = torch._C._storage_Use_Count(each.untyped_storage()._cdata)
        counts += [sys.getrefcount(each), each._use_count(), storage]
    return counts


@cache
def _sole_counts(is_view: bool) -> list[int]:
    """Return the counts of a tensor that nothing else refers to. They depend on the interpreter."""
    counts: list[int] = []

    def count(tensor: Tensor) -> None:
        counts.extend(_reference_counts(tensor, tensor._is_view()))

    tensor = torch.empty(1, device="cpu").t() if is_view else torch.empty(1, device="cpu")
    count(tensor)
    return counts


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A gradient of its own, with the leaf's strides where they can be kept."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, device=gradient.device, requires_grad=False).copy_(gradient)


_Hook = Callable[..., Any]
Hooks = Mapping[int, _Hook]  # All Python hooks of a kind that a node has, now and later, in order of registration


def accumulate_with_hooks(
    gradients: dict[Tensor, Tensor], hooks: tuple[Hooks, Hooks], leaf: Tensor, gradient: Tensor, sole: bool
) -> None:
    """Add the complete gradient of one backward to the context's, and run the hooks of the leaf's node around it.

    hooks: of `hooks_of`. sole: see `accumulate`.
    Raises: what the hooks raise; RuntimeError for a prehook that does not return one gradient.
    """
    before, after = hooks
    if not before and not after:
        accumulate(gradients, leaf, gradient, sole)
        return
    incoming: tuple[Tensor | None] = (gradient,)
    for hook in list(before.values()):
        changed = hook(incoming)
        if changed is not None:
            incoming = _single(changed, hook)
    (changed,) = incoming
    if changed is None:
        return
    accumulate(gradients, leaf, changed, sole=False)
    for hook in list(after.values()):
        hook((), incoming)


def hooks_of(node: Node) -> tuple[Hooks, Hooks]:
    """Return the Python hooks that run before and after a node. What is registered later appears in them."""
    return _registered(node.register_prehook), _registered(node.register_hook)


def _registered(register: Callable[[_Hook], Any]) -> Hooks:
    """Return the dict of all hooks of a kind, which torch keeps and gives to every handle."""
    handle = register(_do_nothing)
    hooks: Hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _do_nothing(*_: Any) -> None:
    """A backward in another thread may call this while it is registered."""


def _single(changed: Any, hook: _Hook) -> tuple[Tensor | None]:
    gradients = changed if isinstance(changed, tuple) else (changed,)
    if len(gradients) != 1 or not isinstance(gradients[0], Tensor | None):
        raise RpcError(f"prehook {hook!r} of a leaf's node must return one gradient or None, got {changed!r}")
    return gradients
