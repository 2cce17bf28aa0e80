"""Have one node compute some of its gradients, without running it as part of a backward.

A node of C++ computes the gradients of those children only that the backward in progress needs. So a backward of its
own is begun, over a private graph of one function that calls the node; it asks for the wanted children, which it
never reaches: nothing is delivered to them, no hook of theirs runs, but they count as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hvlike.autograd.graph import Edges


class _Door(torch.autograd.Function):
    """The private graph."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, inside: Callable[[], None]) -> Tensor:
        ctx.inside = inside
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.inside()
        return None, None


_enter: Callable[[Tensor, Callable[[], None]], Tensor] = _Door.apply


def evaluate(
    node: Any, edges: Edges[Node], places: Sequence[int], incoming: Sequence[Tensor | None]
) -> dict[int, Tensor | None]:
    """Return the gradients for the children at these places among the node's (edges), by place; None: not defined.

    node: of C++. incoming: the complete gradients of its outputs. Its saved tensors stay. Source: the engine's
    exec_info, which `grad(inputs=...)` fills.
    """
    results: list[Any] = []

    def inside() -> None:
        result = node(*incoming)
        results.extend(result if isinstance(result, tuple) else (result,))

    wanted = [GradientEdge(child, number) for child, number in (edges[place] for place in places) if child is not None]
    key = torch.empty(0, device="cpu", requires_grad=True)
    with torch.enable_grad():
        door = _enter(key, inside)
    inputs = [get_gradient_edge(key), *wanted]
    # The gradient of a scalar is left to torch: for a given one it would import a lot at its first use.
    torch.autograd.grad([door], inputs, retain_graph=True, allow_unused=True)
    return {place: _fit(results[place], *edge) for place, edge in zip(places, wanted, strict=True)}


def _fit(gradient: Tensor | None, node: Node, number: int, *_: object) -> Tensor | None:
    """Give a gradient the shape and dtype that input `number` of the node has, as the engine does before hooks."""
    if gradient is None:
        return None
    expected: Any = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    return gradient if gradient.dtype is expected.dtype else gradient.to(expected.dtype)
