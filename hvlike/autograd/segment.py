"""One run of torch's engine over a part of the local graph: every node in it once, with all of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hvlike.autograd.boundary import Boundary, Catch
from hvlike.autograd.graph import Edges

_Run = Callable[..., tuple[Tensor | None, ...]]

# torch.autograd.grad, without its own look at the arguments: that takes as long as a small graph.
_run_with_devices: _Run = torch.autograd.graph._engine_run_backward
# What that adds is for the threads that the engine has for GPUs, and for logs.
_run: _Run = torch.autograd.Variable._execution_engine.run_backward
_uses_devices: Callable[[], bool] = torch.cuda.is_initialized


class Segment(NamedTuple):
    """What has run, for those who look on."""

    kind: str
    """"plain", "selective" (it had boundaries) or "final"."""
    nodes: int
    """How many nodes it had, those for leaves and recvs among them."""
    sends: tuple[int, ...]
    """Numbers of the messages of this worker that were answered since the segment before."""
    recvs: tuple[int, ...]
    """Numbers of the messages to this worker whose gradients it has led to."""
    leaves: int
    """Leaves whose gradient is complete."""
    start: int
    """perf_counter_ns."""
    end: int
    """perf_counter_ns."""


Values = dict[Node, dict[int, Tensor]]
"""Gradients that have come to nodes that have not run, by the number of the node's input."""


def add_value(values: Values, node: Node, number: int, gradient: Tensor) -> None:
    """Add to what has come to an input; never in place: others may hold what is there."""
    inputs = values.setdefault(node, {})
    before = inputs.get(number)
    if before is None:
        inputs[number] = gradient
    elif before.layout is not torch.strided and gradient.layout is torch.strided:
        inputs[number] = gradient + before
    else:
        inputs[number] = before + gradient


def take_values(values: Values, nodes: Sequence[Node]) -> tuple[list[GradientEdge], list[Tensor]]:
    """Remove what has come to these nodes, as outputs and their gradients for the engine."""
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
    """Run what leads from the outputs to the inputs; return the gradients of the inputs, None where none came.

    boundaries: nodes with children that do not run, and their places; `catch` is told what goes there. The lists of
    the outputs are emptied, so that their gradients are held by nobody else afterwards.
    """
    starts, gradients = outputs
    try:
        if not starts or not inputs:
            return [None] * len(inputs)
        run = _run_with_devices if _uses_devices() else _run
        arguments = tuple(starts), tuple(gradients), retain_graph, False, tuple(inputs), True, False
        if not boundaries:
            return list(run(*arguments))
        with ExitStack() as watched:
            for node, places in boundaries.items():
                watched.enter_context(Boundary(node, edges[node], places, catch))
            return list(run(*arguments))
    finally:
        starts.clear()
        gradients.clear()
