"""A node that runs now while some of its children do not yet: the gradients for these are caught.

To capture them in the engine would be wrong: the tensor hooks of a child run at each capture, here with a part of the
gradient, and where one such child leads to another the engine would run it.

    node of C++         its prehook lets it compute the gradients for these children (see selective), the engine's own
                        run of it then computes those for the others: none twice
    Python Function     computes all its gradients whatever is needed; its last hook sees them

The node's own hooks see all gradients, together and once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hvlike.autograd.graph import Edges
from hvlike.autograd.selective import evaluate

Catch = Callable[[Node, int, Tensor], None]
_Gradients = tuple[Tensor | None, ...]


class Boundary:
    """Watches one node during one run of the engine; a context manager."""

    def __init__(self, node: Node, edges: Edges[Node], places: Sequence[int], catch: Catch) -> None:
        """places: of the children that do not run, among all (edges). catch: called with child, input and gradient."""
        self._node: Any = node
        self._edges = edges
        self._places = places
        self._catch = catch
        self._early: dict[int, Tensor | None] = {}
        """What a node of C++ has computed for these children."""
        self._theirs: dict[int, Callable[..., Any]] = {}
        """Hooks of others, which this one calls in the meantime: they would not see what is computed early."""
        self._handles: list[Any] = []

    def __enter__(self) -> Boundary:
        after = self._node.register_hook(self._after)
        self._handles.append(after)
        if not isinstance(self._node, torch._C._FunctionBase):
            self._handles.append(self._node.register_prehook(self._before))
            hooks = after.hooks_dict_ref()
            self._theirs = {key: hook for key, hook in hooks.items() if key != after.id}
            for key in self._theirs:
                del hooks[key]
        return self

    def __exit__(self, *_: object) -> None:
        after = self._handles[0]
        hooks = after.hooks_dict_ref()
        for handle in self._handles:
            handle.remove()
        # One that was registered meanwhile comes after these.
        since = dict(hooks)
        hooks.clear()
        hooks.update(self._theirs)
        hooks.update(since)

    def _before(self, incoming: _Gradients) -> None:
        self._early = evaluate(self._node, self._edges, self._places, incoming)

    def _after(self, computed: _Gradients, incoming: _Gradients) -> _Gradients | None:
        """The last hook of the node."""
        gradients = list(computed)
        for place, gradient in self._early.items():
            gradients[place] = gradient
        complete = tuple(gradients)
        for hook in self._theirs.values():
            changed = hook(complete, incoming)
            if changed is not None:
                complete = changed if isinstance(changed, tuple) else (changed,)
        for place in self._places:
            child, number = self._edges[place]
            if child is not None and (gradient := complete[place]) is not None:
                self._catch(child, number, gradient)
        if not self._theirs:
            return None
        # The engine refuses a gradient where the node itself has computed none.
        return tuple(None if place in self._early else gradient for place, gradient in enumerate(complete))
