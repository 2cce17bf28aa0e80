"""What distributed autograd does to a local graph before it runs, beside the plain backward of the same graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.graph import clear
from hvlike.autograd.local_graph import LocalGraph

_ELEMENTS = 4
_TIMES = 7


@dataclass(frozen=True)
class Analysis:
    """Seconds, medians over repetitions on one rank; everybody else sleeps."""

    nodes: int
    backward: float
    """Of torch's engine over the whole graph."""
    scan: float
    """Finding all nodes, leaves and dependencies: once a backward on every worker."""
    order: float
    """Finding out what can run: only on a worker that waits for gradients of others."""


def analyse(nodes: int) -> Analysis:
    """Measure a chain of so many small operations. Local, blocks."""
    leaf = torch.randn(_ELEMENTS, requires_grad=True)
    root = _chain(leaf, nodes)
    edge = get_gradient_edge(root)

    def scan() -> LocalGraph:
        graph = LocalGraph({})
        graph.reach([edge.node])
        return graph

    graph = scan()
    return Analysis(
        nodes=len(graph.scan.edges),
        backward=_seconds(lambda: torch.autograd.grad(root, leaf, retain_graph=True)),
        scan=_seconds(scan),
        order=_seconds(lambda: clear(graph.scan.edges, dict(graph.scan.waits), [edge.node])),
    )


def _chain(leaf: Tensor, nodes: int) -> Tensor:
    value = leaf
    # A sum at the end and the leaf's own node are two of them.
    for _ in range(nodes - 2):
        value = torch.tanh(value)
    return value.sum()


def _seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        kept = work()
        taken.append(time.perf_counter() - start)
        del kept
    return statistics.median(taken)
