"""What runs while gradients are missing. Capital letters are targets; R and S are urgent, P can be captured in part."""

from __future__ import annotations

import random

import pytest
from unit.autograd.test_graph import graph

from hvlike.autograd.graph import BackwardPlan, Scan, clear, plan


def planned(text: str, order: str, done: str = "") -> BackwardPlan[str] | None:
    return plan(graph(text), order, {*order, *done}, str.isupper, "RS".__contains__, "P".__contains__)


@pytest.mark.parametrize(
    ("text", "order", "nodes", "later", "boundaries", "partial"),
    [
        # Nothing leads to what is blocked: all of it runs, in one ordinary segment.
        ("a: b; b: R L", "abRL", "abRL", "", {}, ""),
        # Also when nobody waits for it: there is time for it now.
        ("a: L", "aL", "aL", "", {}, ""),
        # A leaf without hooks may be captured twice.
        ("a: b P; b: R P; x: P", "abR", "abR", "", {}, "P"),
        # b hands gradients to x, which is blocked.
        ("a: b; b: R x", "abR", "abR", "", {"b": [1]}, ""),
        ("a: b; b: x R x", "abR", "abR", "", {"b": [0, 2]}, ""),
        # What leads to no target is put off, and what leads there from what runs is caught.
        ("a: b c; b: R; c: x", "abcR", "abR", "c", {"a": [1]}, ""),
        # A leaf that is complete is a target like R, once something has to run.
        ("a: b c; b: R; c: x L", "abcRL", "abcRL", "", {"c": [0]}, ""),
        # Where something is caught anyway, a part of P is caught too: the engine would run x to capture it.
        ("a: b P; b: R x; x: P", "abR", "abR", "", {"a": [1], "b": [1]}, ""),
    ],
)
def test_what_runs(
    text: str, order: str, nodes: str, later: str, boundaries: dict[str, list[int]], partial: str
) -> None:
    assert planned(text, order) == BackwardPlan(list(nodes), list(later), boundaries, list(partial))


@pytest.mark.parametrize(("text", "order"), [("a: b", ""), ("a: x", "a"), ("a: L x", "aL")])
def test_nothing_runs_when_nobody_waits_for_it_and_it_would_have_to_be_cut(text: str, order: str) -> None:
    assert planned(text, order) is None


def test_children_that_have_run_are_no_obstacle() -> None:
    assert planned("a: R b", "aR", done="b") == BackwardPlan(["a", "R"], [])


def test_every_node_runs_once_after_its_parents_and_urgent_ones_as_soon_as_they_can() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        edges = {
            node: [(draw.randrange(node + 1, 14), 0) for _ in range(draw.choice((0, 1, 2, 3)))] for node in range(13)
        } | {13: []}
        starts = draw.sample(range(8), 4)
        scan: Scan[int] = Scan(edges.__getitem__)
        scan.reach(starts)
        ends = {node for node in scan.edges if not edges[node]}
        urgent = {node for node in ends if node % 2}
        for start in starts:
            scan.waits[start] += 1
        ran: list[int] = []
        waiting: list[int] = []
        for start in starts:
            scan.waits[start] -= 1
            waiting += clear(scan.edges, scan.waits, [] if scan.waits[start] else [start])
            chosen = plan(edges, waiting, {*ran, *waiting}, ends.__contains__, urgent.__contains__, lambda node: False)
            if chosen is not None:
                assert sorted(chosen.nodes + chosen.later) == sorted(waiting)
                for node in chosen.nodes:
                    places = [place for place, (child, _) in enumerate(edges[node]) if child not in chosen.nodes]
                    assert chosen.boundaries.get(node, []) == places
                ran += chosen.nodes
                waiting = chosen.later
            assert not urgent.intersection(waiting)
        ran += waiting
        assert sorted(ran) == sorted(scan.edges)
        for node in ran:
            assert all(ran.index(child) > ran.index(node) for child, _ in edges[node])
