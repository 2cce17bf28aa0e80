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


_Hook = Callable[..., Any]
Hooks = Mapping[int, _Hook]
"""All Python hooks of a kind that a node has, now and later, in the order in which they were registered."""


def deliver(
    gradients: dict[Tensor, Tensor], hooks: tuple[Hooks, Hooks], leaf: Tensor, gradient: Tensor, sole: bool
) -> None:
    """Add the complete gradient of one backward to the context's, and run the hooks of the leaf's node around it.

    hooks: see `hooks_of`. sole: see `accumulate`.
    Raises: what the hooks raise, RuntimeError for a prehook that does not return one gradient.
    """
    before, after = hooks
    if not before and not after:
        accumulate(gradients, leaf, gradient, sole)
        return
    incoming: tuple[Tensor | None] = (gradient,)
    for hook in list(before.values()):
        changed = hook(incoming)
        if changed is not None:
            incoming = _one(changed, hook)
    (changed,) = incoming
    if changed is None:
        return
    accumulate(gradients, leaf, changed, sole=False)
    for hook in list(after.values()):
        hook((), incoming)


def hooks_of(node: Node) -> tuple[Hooks, Hooks]:
    """The Python hooks that run before and after a node; what is registered later comes in."""
    return _registered(node.register_prehook), _registered(node.register_hook)


def _registered(register: Callable[[_Hook], Any]) -> Hooks:
    """All Python hooks of a kind stand in one dict for ever, which is shown to whoever registers another one."""
    handle = register(_nothing)
    hooks: Hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _nothing(*_: Any) -> None:
    """In another thread's backward it may be met while it stands in the dict."""


def _one(changed: Any, hook: _Hook) -> tuple[Tensor | None]:
    gradients = changed if isinstance(changed, tuple) else (changed,)
    if len(gradients) != 1 or not isinstance(gradients[0], Tensor | None):
        raise RpcError(f"prehook {hook!r} of a leaf's node must return one gradient or None, got {changed!r}")
    return gradients
