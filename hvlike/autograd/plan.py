"""What the next segment of a backward runs while gradients of other workers are still missing. Plain data only.

    a -> b -> r        b and r can run, x cannot: it also waits for the gradient of something that was sent.
         b -> x        b hands gradients to r, which runs now, and to x, which does not: b is a boundary.

A segment without boundaries is one ordinary run of autograd's engine. Boundaries cost more, so only what leads to
targets is run then, and the rest is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hvlike.autograd.graph import Edges, crossing, leading_to, outside

N = TypeVar("N", bound=Hashable)


@dataclass
class Plan(Generic[N]):
    """One segment."""

    nodes: list[N]
    """What runs, each node before its children."""
    later: list[N]
    """What could run and does not, in the same order."""
    boundaries: dict[N, list[int]] = field(default_factory=dict)
    """Of the nodes, those with children that do not run, and the places of these among their children."""
    partial: list[N] = field(default_factory=list)
    """Children that do not run and may be captured all the same, with a part of their gradient."""


def plan(
    edges: Mapping[N, Edges[N]],
    order: Sequence[N],
    cleared: Collection[N],
    is_target: Callable[[N], bool],
    is_urgent: Callable[[N], bool],
    is_passive: Callable[[N], bool],
) -> Plan[N] | None:
    """Return what of `order` to run now; None: nothing.

    order: what can run and has not, each node before its children. cleared: these and all that has run. is_target: the
    gradient is wanted. is_urgent: it is a target that somebody waits for. is_passive: capturing a part of the node's
    gradient is seen by nobody.
    """
    beyond = outside(edges, order, cleared)
    if all(is_passive(node) for node in beyond):
        return Plan(list(order), [], partial=beyond) if order else None
    targets = [node for node in order if is_target(node)]
    if not any(is_urgent(node) for node in targets):
        return None
    nodes = leading_to(edges, order, targets)
    running = set(nodes)
    later = [node for node in order if node not in running]
    # Children that have run cannot be: they would have waited for this node.
    return Plan(nodes, later, boundaries=crossing(edges, nodes, running))
