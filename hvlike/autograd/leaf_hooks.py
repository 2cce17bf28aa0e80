"""Hooks on the AccumulateGrad node of a leaf, which the engine does not run where it only captures a gradient.

    hooks of the leaf (tensor.register_hook)        run by the engine
    node.register_prehook                           run here, may change the gradient
    the gradient goes into the context's map
    node.register_hook                              run here

The hooks that `register_post_accumulate_grad_hook` registers wait for `.grad` to change and are not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from hvlike.autograd.accumulation import accumulate
from hvlike.errors import RpcError

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
