"""Graph algorithms for backward: what is reached, what can run, and what the next segment runs. Pure.

Nodes are any hashable objects. The children of a node are what it hands gradients to: pairs of a node, or None, and
the number of that node's input. A graph has no cycles, but several paths and edges may lead to one node.

While gradients of other workers are missing, `plan` chooses the next segment:

    a -> b -> r        b and r can run. x cannot: it also waits for the gradient of a tensor that was sent.
         b -> x        b hands gradients to r, which runs now, and to x, which does not: b is a boundary node.

A segment without boundary nodes is one ordinary run of autograd's engine. Boundary nodes cost more, so a segment that
needs them runs only what leads to its targets and leaves the rest for later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)
Edges = Sequence[tuple[N | None, int]]


class Scan(Generic[N]):
    """The part of a graph that has been reached."""

    def __init__(self, edges_of: Callable[[N], Edges[N]]) -> None:
        """edges_of: returns the children of a node; called once for each node."""
        self._edges_of = edges_of
        self.edges: dict[N, Edges[N]] = {}  # The children of each node that was reached
        self.waits: dict[N, int] = {}  # For each node the number of edges that lead to it from nodes that were reached

    def reach(self, starts: Iterable[N]) -> list[N]:
        """Go on from these nodes and return the nodes without children that were not reached before."""
        edges_of, edges, waits = self._edges_of, self.edges, self.waits
        stack = [node for node in dict.fromkeys(starts) if node not in waits]
        for node in stack:
            waits[node] = 0
        ends = []
        while stack:
            node = stack.pop()
            edges[node] = children = edges_of(node)
            if not children:
                ends.append(node)
            for child, _ in children:
                if child is None:
                    continue
                if child in waits:
                    waits[child] += 1
                else:
                    waits[child] = 1
                    stack.append(child)
        return ends


def clear(edges: Mapping[N, Edges[N]], waits: dict[N, int], ready: Iterable[N]) -> list[N]:
    """Return `ready` and all nodes that wait for nothing else, each after those it waited for, and count `waits` down.

    ready: nodes that wait for nothing. Source: A. B. Kahn, Topological sorting of large networks, 1962.
    """
    order = list(ready)
    # The list grows during the loop.
    for node in order:
        for child, _ in edges[node]:
            if child is not None:
                waits[child] -= 1
                if not waits[child]:
                    order.append(child)
    return order


def leading_to(edges: Mapping[N, Edges[N]], order: Sequence[N], targets: Iterable[N]) -> list[N]:
    """Return the nodes of `order` from which a target is reached, and the targets, in the same order.

    order: nodes, each before its children. targets: some of these. Only paths inside of `order` count.
    """
    leads = set(targets)
    for node in reversed(order):
        if node not in leads and any(child in leads for child, _ in edges[node]):
            leads.add(node)
    return [node for node in order if node in leads]


def outside(edges: Mapping[N, Edges[N]], nodes: Iterable[N], inside: Collection[N]) -> list[N]:
    """Return the children of `nodes` that are not inside, each once."""
    return list(
        dict.fromkeys(child for node in nodes for child, _ in edges[node] if child is not None and child not in inside)
    )


def crossing(edges: Mapping[N, Edges[N]], nodes: Iterable[N], inside: Collection[N]) -> dict[N, list[int]]:
    """Return, for each of the nodes that has children outside, their places among its children."""
    found = {}
    for node in nodes:
        places = [place for place, (child, _) in enumerate(edges[node]) if child is not None and child not in inside]
        if places:
            found[node] = places
    return found


@dataclass
class BackwardPlan(Generic[N]):
    """One segment."""

    nodes: list[N]  # The nodes that run, each before its children
    later: list[N]  # The nodes that could run and do not, in the same order
    # The nodes with children that do not run, and the places of these.
    boundaries: dict[N, list[int]] = field(default_factory=dict)
    partial: list[N] = field(default_factory=list)  # Children that do not run, captured with a part of their gradient


def plan(
    edges: Mapping[N, Edges[N]],
    order: Sequence[N],
    cleared: Collection[N],
    is_target: Callable[[N], bool],
    is_urgent: Callable[[N], bool],
    is_passive: Callable[[N], bool],
) -> BackwardPlan[N] | None:
    """Return the next segment, None if nothing should run now.

    order: the nodes that can run and have not, each before its children.
    cleared: these nodes and all that have run.
    is_target: whether the gradient of a node is wanted.
    is_urgent: whether it is a target that another worker waits for.
    is_passive: whether a part of the node's gradient may be captured because no hook sees it.
    """
    beyond = outside(edges, order, cleared)
    if all(is_passive(node) for node in beyond):
        return BackwardPlan(list(order), [], partial=beyond) if order else None
    targets = [node for node in order if is_target(node)]
    if not any(is_urgent(node) for node in targets):
        return None
    nodes = leading_to(edges, order, targets)
    running = set(nodes)
    later = [node for node in order if node not in running]
    # No child of these nodes has run: it would have waited for its parent.
    return BackwardPlan(nodes, later, boundaries=crossing(edges, nodes, running))
