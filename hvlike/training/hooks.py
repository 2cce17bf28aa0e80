"""Learn the moment at which backward has finished a parameter's gradient.

Autograd ends each parameter's path in an AccumulateGrad node. A hook on that node runs after the gradient has been
added to `parameter.grad`, once in each backward pass, however often the parameter is used in the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")
Key = TypeVar("Key")


class GradientHooks(Generic[Owner, Key]):
    """The hooks of one owner; they end with this object.

    A node lives only as long as somebody holds it: without the reference kept here the hooks would silently never
    run. A node also keeps its hooks alive outside of the garbage collector's sight, so a hook may hold the owner
    only weakly, or neither would ever be freed.
    """

    def __init__(self, owner: Owner, on_gradient: Callable[[Owner, Key], None]) -> None:
        """on_gradient: called with the owner, held weakly, and the key of the parameter, in backward's thread."""
        self._owner = weakref.ref(owner)
        self._on_gradient = on_gradient
        self._attached: dict[int, tuple[Any, RemovableHandle]] = {}

    def attach(self, parameter: Tensor, key: Key) -> None:
        """Call `on_gradient(owner, key)` whenever the gradient of `parameter` is done; replaces an earlier hook.

        Does nothing for a parameter that has no such node: not a leaf, frozen, or not initialised yet (lazy modules).
        """
        self.detach(parameter)
        if not parameter.is_leaf or not parameter.requires_grad or isinstance(parameter, UninitializedParameter):
            return
        with torch.enable_grad():
            function = parameter.expand_as(parameter).grad_fn
        if function is None:
            return
        node: Any = function.next_functions[0][0]
        self._attached[id(parameter)] = node, node.register_hook(_hook(self._owner, self._on_gradient, key))

    def detach(self, parameter: Tensor) -> None:
        """Remove the hook of `parameter` if there is one."""
        _, handle = self._attached.pop(id(parameter), (None, None))
        if handle is not None:
            handle.remove()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._attached

    def __len__(self) -> int:
        return len(self._attached)


def _hook(reference: weakref.ref[Owner], on_gradient: Callable[[Owner, Key], None], key: Key) -> Callable[..., None]:
    """Return a function that autograd may keep: it holds nothing that leads back to the node."""

    def gradient_is_done(*_: Any) -> None:
        # Runs once for every parameter: a weak reference is five times faster to follow than a weak method.
        owner = reference()
        if owner is not None:
            on_gradient(owner, key)

    return gradient_is_done
