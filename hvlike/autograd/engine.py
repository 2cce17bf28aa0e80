"""One run of torch's autograd engine over a part of the local graph: every node once, with all of its gradients.

A boundary node runs now while some of its children do not. The gradients for these children are caught:

    node of C++         a prehook has it compute the gradients for these children alone (`evaluate`); the engine's own
                        run of the node then computes the others, so nothing is computed twice
    Python Function     computes all its gradients in any case; its last hook reads them

To let the engine capture them would be wrong: the tensor hooks of a child would run at each capture with a part of the
gradient, and where one such child leads to another the engine would run it. The hooks of the node itself see all
gradients together, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hvlike.autograd.graph import Edges
from hvlike.untraced import untraced

Catch = Callable[[Node, int, Tensor], None]
_Gradients = tuple[Tensor | None, ...]


@untraced
class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, called: Callable[[], None]) -> Tensor:
        ctx.called = called
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.called()
        return None, None


_call_in_backward: Callable[[Tensor, Callable[[], None]], Tensor] = _CallInBackward.apply


def evaluate(
    node: Any, edges: Edges[Node], places: Sequence[int], incoming: Sequence[Tensor | None]
) -> dict[int, Tensor | None]:
    """Return the gradients of a C++ node for the children at these places, by place; None: undefined.

    A node of C++ computes the gradients of those children only that the backward in progress needs. So this begins a
    backward over a private graph of one function that calls the node, and asks for the wanted children. It never
    reaches them, so nothing is delivered to them and none of their hooks runs, but they count as needed.

    edges: the children of the node. incoming: the complete gradients of its outputs. Its saved tensors stay.
    Source: the engine's exec_info, which `grad(inputs=...)` fills.
    """
    results: list[Any] = []

    def call_node() -> None:
        result = node(*incoming)
        results.extend(result if isinstance(result, tuple) else (result,))

    wanted = [GradientEdge(child, number) for child, number in (edges[place] for place in places) if child is not None]
    key = torch.empty(0, device="cpu", requires_grad=True)
    with torch.enable_grad():
        start = _call_in_backward(key, call_node)
    inputs = [get_gradient_edge(key), *wanted]
    # The gradient of a scalar is left to torch: for a given one it would import a lot at its first use.
    torch.autograd.grad([start], inputs, retain_graph=True, allow_unused=True)
    return {place: _fit(results[place], *edge) for place, edge in zip(places, wanted, strict=True)}


def _fit(gradient: Tensor | None, node: Node, number: int, *_: object) -> Tensor | None:
    """Give a gradient the shape and dtype of input `number` of the node, as the engine does before hooks."""
    if gradient is None:
        return None
    expected: Any = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    return gradient if gradient.dtype is expected.dtype else gradient.to(expected.dtype)


@untraced
class BoundaryNode:
    """Hooks of a boundary node during one run of the engine; a context manager."""

    def __init__(self, node: Node, edges: Edges[Node], places: Sequence[int], catch: Catch) -> None:
        """edges: its children. places: those that do not run. catch: takes child, number of the input and gradient."""
        self._node: Any = node
        self._edges = edges
        self._places = places
        self._catch = catch
        self._early: dict[int, Tensor | None] = {}  # What a node of C++ has computed for these children before it runs
        self._others: dict[int, Callable[..., Any]] = {}
        """The node's other hooks, which `_after` calls: they would not see what is computed early."""
        self._handles: list[Any] = []

    def __enter__(self) -> BoundaryNode:
        after = self._node.register_hook(self._after)
        self._handles.append(after)
        if not isinstance(self._node, torch._C._FunctionBase):
            self._handles.append(self._node.register_prehook(self._before))
            hooks = after.hooks_dict_ref()
            self._others = {key: hook for key, hook in hooks.items() if key != after.id}
            for key in self._others:
                del hooks[key]
        return self

    def __exit__(self, *_: object) -> None:
        after = self._handles[0]
        hooks = after.hooks_dict_ref()
        for handle in self._handles:
            handle.remove()
        # Hooks that were registered meanwhile come after these.
        since = dict(hooks)
        hooks.clear()
        hooks.update(self._others)
        hooks.update(since)

    def _before(self, incoming: _Gradients) -> None:
        self._early = evaluate(self._node, self._edges, self._places, incoming)

    def _after(self, computed: _Gradients, incoming: _Gradients) -> _Gradients | None:
        gradients = list(computed)
        for place, gradient in self._early.items():
            gradients[place] = gradient
        complete = tuple(gradients)
        for hook in self._others.values():
            changed = hook(complete, incoming)
            if changed is not None:
                complete = changed if isinstance(changed, tuple) else (changed,)
        for place in self._places:
            child, number = self._edges[place]
            if child is not None and (gradient := complete[place]) is not None:
                self._catch(child, number, gradient)
        if not self._others:
            return None
        # The engine refuses a gradient where the node itself has computed none.
        return tuple(None if place in self._early else gradient for place, gradient in enumerate(complete))


# torch.autograd.grad without its checks of the arguments, which take as long as a small graph.
_run: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.graph._engine_run_backward


class SegmentRecord(NamedTuple):
    """A segment that has run, for the timeline and `draw`."""

    kind: str  # "plain", "selective" (it had boundary nodes) or "final"
    nodes: int  # The number of its nodes, with those of leaves and recvs
    sends: tuple[int, ...]  # The sends that were answered since the segment before
    recvs: tuple[int, ...]  # The recvs whose gradients it has computed
    leaves: int  # The number of leaves whose gradients it has completed
    start: int  # perf_counter_ns
    end: int  # perf_counter_ns


Values = dict[Node, dict[int, Tensor]]  # Gradients that came to nodes that have not run, by number of the input


def add_value(values: Values, node: Node, number: int, gradient: Tensor) -> None:
    """Add a gradient to what has come to an input. Not in place: the user may refer to what is there."""
    inputs = values.setdefault(node, {})
    before = inputs.get(number)
    if before is None:
        inputs[number] = gradient
    elif before.layout is not torch.strided and gradient.layout is torch.strided:
        inputs[number] = gradient + before
    else:
        inputs[number] = before + gradient


def take_values(values: Values, nodes: Sequence[Node]) -> tuple[list[GradientEdge], list[Tensor]]:
    """Remove and return what has come to these nodes, as outputs and their gradients for the engine."""
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    for node in [node for node in nodes if node in values]:
        for number, gradient in values.pop(node).items():
            edges.append(GradientEdge(node, number))
            gradients.append(gradient)
    return edges, gradients


def run_engine(
    outputs: tuple[list[GradientEdge], list[Tensor]],
    inputs: Sequence[GradientEdge],
    boundaries: Mapping[Node, list[int]],
    edges: Mapping[Node, Edges[Node]],
    catch: Catch,
    retain_graph: bool,
) -> list[Tensor | None]:
    """Run what leads from the outputs to the inputs. Returns the gradients of the inputs, None where none came.

    outputs: nodes and their gradients. Both lists are emptied, so that nothing here refers to the gradients afterwards.
    boundaries: nodes with children that do not run, and the places of these; `catch` gets their gradients.
    edges: the children of the nodes.
    """
    starts, gradients = outputs
    try:
        if not starts or not inputs:
            return [None] * len(inputs)
        arguments = tuple(starts), tuple(gradients), retain_graph, False, tuple(inputs), True, False
        if not boundaries:
            return list(_run(*arguments))
        with ExitStack() as watched:
            for node, places in boundaries.items():
                watched.enter_context(BoundaryNode(node, edges[node], places, catch))
            return list(_run(*arguments))
    finally:
        starts.clear()
        gradients.clear()
