"""The analysis of a graph, the plan of what runs while gradients are missing, and its picture as text.

Graphs are of letters: `a: b b c` means two edges from a to b and one to c. In plans capital letters are targets; R and
S are urgent, P can be captured in part.
"""

from __future__ import annotations

import random
import re
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlike.autograd.graph import BackwardPlan, Edges, Scan, clear, crossing, leading_to, outside, plan
from hvlike.autograd.graphviz import Cluster, quote, write_dot

N = TypeVar("N", int, str)


def graph(text: str) -> dict[str, Edges[str]]:
    """Edges by letter; `-` is an edge to nothing."""
    edges: dict[str, Edges[str]] = {}
    for line in text.split(";"):
        node, _, children = line.partition(":")
        edges[node.strip()] = [
            (None if child == "-" else child, number) for number, child in enumerate(children.split())
        ]
    return {letter: edges.get(letter, []) for letter in {*edges, *(c for e in edges.values() for c, _ in e if c)}}


def test_children_outside_are_named_once_and_their_places_all() -> None:
    edges = graph("a: b x - x; b: y; c: b")
    assert outside(edges, "abc", "abc") == ["x", "y"]
    assert crossing(edges, "abc", "abc") == {"a": [1, 3], "b": [0]}


Graph = dict[int, Edges[int]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Edges lead to larger numbers, so there is no cycle."""
    size = draw(st.integers(1, 9))
    return {
        node: [
            (child if child is None or child > node else None, 0)
            for child in draw(st.lists(st.none() | st.integers(node, size - 1), max_size=3))
        ]
        for node in range(size)
    }


def reachable(edges: Graph, starts: set[int]) -> set[int]:
    """By brute force."""
    found: set[int] = set()
    while starts - found:
        found |= starts
        starts = {child for node in found for child, _ in edges[node] if child is not None}
    return found


@settings(max_examples=100)
@given(graphs(), st.data())
def test_analysis_equals_brute_force(edges: Graph, data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(sorted(edges)))
    starts, blocked, targets = data.draw(some), data.draw(some), data.draw(some)
    scan = Scan(edges.__getitem__)
    # In two goes.
    ends = scan.reach(starts & targets) + scan.reach(starts)
    everything = reachable(edges, starts)
    assert scan.waits.keys() == scan.edges.keys() == everything
    assert sorted(ends) == sorted(node for node in everything if not edges[node])
    for node in everything:
        assert scan.waits[node] == sum(child == node for parent in everything for child, _ in edges[parent])
    for node in blocked & starts:
        scan.waits[node] += 1
    order = clear(scan.edges, scan.waits, [node for node in sorted(starts) if not scan.waits[node]])
    assert len(order) == len(set(order))
    assert set(order) == everything - reachable(edges, blocked & starts)
    assert_sorted(edges, order)
    inside: Graph = {node: [(child, 0) for child, _ in edges[node] if child in order] for node in order}
    targets &= set(order)
    leading = leading_to(edges, order, targets)
    assert set(leading) == {node for node in order if reachable(inside, {node}) & targets}
    assert leading == [node for node in order if node in leading]


def assert_sorted(edges: dict[N, Edges[N]], order: list[N]) -> None:
    """Each node stands before its children."""
    places = {node: place for place, node in enumerate(order)}
    for node, place in places.items():
        for child, _ in edges[node]:
            assert child is None or places.get(child, place + 1) > place


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


def test_nothing_runs_that_nobody_waits_for_and_that_would_have_to_be_cut() -> None:
    assert [planned(*each) for each in (("a: b", ""), ("a: x", "a"), ("a: L x", "aL"))] == [None] * 3


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


def clusters() -> list[Cluster]:
    """worker 0: root -> recv 5, a leaf; worker 1: send 5 -> node -> leaf."""
    trainer, master = Cluster(1, "trainer (rank 1)\nsegment 1: final, nodes: 3"), Cluster(0, "master (rank 0)")
    trainer.sends[5] = trainer.sends[6] = trainer.add_node("send", "to master", [1])
    trainer.add_node("node", "AddBackward0")
    trainer.add_node("leaf", "leaf\n[2]")
    trainer.statements += ["w1n0 -> w1n1;", "w1n1 -> w1n2;"]
    master.add_node("root", 'a "root"')
    master.recvs = {
        5: master.add_node("recv", "from trainer", [1, 2]),
        7: master.add_node("recv", "from elsewhere"),
    }
    master.statements.append("w0n0 -> w0n1;")
    return [trainer, master]


PICTURE = r"""digraph autograd {
  label="two workers"; labelloc=t; rankdir=LR;
  node [fontname="Helvetica", fontsize=10];
  subgraph cluster_0 {
    label="master (rank 0)";
    w0n0 [shape=doublecircle, label="a \"root\""];
    w0n1 [shape=house, label="from trainer\nsegments 1, 2", style=filled, fillcolor=lightyellow];
    w0n2 [shape=house, label="from elsewhere"];
    w0n0 -> w0n1;
  }
  subgraph cluster_1 {
    label="trainer (rank 1)\nsegment 1: final, nodes: 3";
    w1n0 [shape=cds, label="to master\nsegment 1", style=filled, fillcolor=lightyellow];
    w1n1 [shape=box, label="AddBackward0"];
    w1n2 [shape=ellipse, label="leaf\n[2]"];
    w1n0 -> w1n1;
    w1n1 -> w1n2;
  }
  w0n1 -> w1n0 [style=dashed];
}
"""


def test_two_workers() -> None:
    """Messages of which one end is unknown lead nowhere."""
    assert write_dot("two workers", clusters()) == PICTURE
    assert write_dot("two workers", reversed(clusters())) == PICTURE


def test_nothing() -> None:
    assert re.fullmatch(r"digraph autograd \{\n.*\n.*\n\}\n", write_dot("", []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", '"plain"'), ('say "x"', r'"say \"x\""'), ("C:\\n", r'"C:\\n"'), ("a\nb", r'"a\nb"')],
)
def test_quoting(text: str, expected: str) -> None:
    assert quote(text) == expected
