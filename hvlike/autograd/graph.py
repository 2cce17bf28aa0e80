"""Which nodes of a graph can run: functions over plain data that know nothing of torch.

A node's children are what it hands gradients to: pairs of a node, or None, and the number of the input there. Nodes
are any hashable objects. A graph has no cycles, but may lead to one node on several ways and by several edges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)
Edges = Sequence[tuple[N | None, int]]


class Scan(Generic[N]):
    """The part of a graph that was reached so far."""

    def __init__(self, edges_of: Callable[[N], Edges[N]]) -> None:
        """edges_of: a node's children; asked once for each node."""
        self._edges_of = edges_of
        self.edges: dict[N, Edges[N]] = {}
        """The children of each node that was reached."""
        self.waits: dict[N, int] = {}
        """For each node, how many edges lead to it from nodes that were reached."""

    def reach(self, starts: Iterable[N]) -> list[N]:
        """Go on from these nodes; return the nodes without children that were not reached before."""
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
    """Return `ready` and all nodes that wait for nothing else, each after those it waited for; `waits` is counted down.

    ready: nodes that wait for nothing. Source: A. B. Kahn, Topological sorting of large networks, 1962.
    """
    order = list(ready)
    # The list grows while it is walked through.
    for node in order:
        for child, _ in edges[node]:
            if child is not None:
                waits[child] -= 1
                if not waits[child]:
                    order.append(child)
    return order


def leading_to(edges: Mapping[N, Edges[N]], order: Sequence[N], targets: Iterable[N]) -> list[N]:
    """Return the nodes of `order` from which a target is reached, and the targets in it; in the same order.

    order: each node stands before its children. targets: some of it. Only ways inside of `order` count.
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
    """Return for each of the nodes that has children outside the places of these among its children."""
    found = {}
    for node in nodes:
        places = [place for place, (child, _) in enumerate(edges[node]) if child is not None and child not in inside]
        if places:
            found[node] = places
    return found
