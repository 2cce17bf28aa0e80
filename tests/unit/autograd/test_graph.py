"""The analysis of a graph, over graphs of letters: `a: b b c` means two edges from a to b and one to c."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlike.autograd.graph import Edges, Scan, clear, crossing, leading_to, outside

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


def scanned(text: str, starts: str) -> Scan[str]:
    scan = Scan(graph(text).__getitem__)
    scan.reach(starts)
    return scan


@pytest.mark.parametrize(
    ("text", "starts", "waits", "ends"),
    [
        ("a:", "a", {"a": 0}, "a"),
        ("a:", "aa", {"a": 0}, "a"),
        ("a: b", "a", {"a": 0, "b": 1}, "b"),
        ("a: b b", "a", {"a": 0, "b": 2}, "b"),
        ("a: -", "a", {"a": 0}, ""),
        ("a: b c; b: d; c: d", "a", {"a": 0, "b": 1, "c": 1, "d": 2}, "d"),
        ("a: b c; b: d; c: d", "ac", {"a": 0, "b": 1, "c": 1, "d": 2}, "d"),
        ("a: b; x: b", "a", {"a": 0, "b": 1}, "b"),
        ("a: b; x: b", "ax", {"a": 0, "x": 0, "b": 2}, "b"),
        ("a: b; b: c", "", {}, ""),
    ],
)
def test_scan_counts_the_edges_that_lead_to_each_node(text: str, starts: str, waits: dict[str, int], ends: str) -> None:
    scan = Scan(graph(text).__getitem__)
    assert sorted(scan.reach(starts)) == sorted(ends)
    assert scan.waits == waits
    assert scan.edges.keys() == waits.keys()


def test_scan_in_two_goes_equals_scan_in_one() -> None:
    text = "a: b c; b: d; c: d; x: c y; y: e"
    scan = scanned(text, "a")
    assert scan.reach("x") == ["e"]
    assert scan.waits == scanned(text, "ax").waits


@pytest.mark.parametrize(
    ("text", "starts", "blocked", "order"),
    [
        ("a: b c; b: d; c: d", "a", "", "acbd"),
        ("a: b c; b: d; c: d", "ab", "b", "ac"),
        ("a: b b; b: c", "a", "", "abc"),
        ("a: b; x: b", "ax", "x", "a"),
        ("a: b; x: b", "ax", "ax", ""),
    ],
)
def test_what_waits_for_nothing_that_is_blocked_is_cleared(text: str, starts: str, blocked: str, order: str) -> None:
    scan = scanned(text, starts)
    for node in blocked:
        scan.waits[node] += 1
    ready = [node for node in starts if not scan.waits[node]]
    cleared = clear(scan.edges, scan.waits, ready)
    assert sorted(cleared) == sorted(order)
    assert_sorted(scan.edges, cleared)


def test_what_was_blocked_is_cleared_later() -> None:
    scan = scanned("a: b; x: b c; b: d", "ax")
    scan.waits["x"] += 1
    assert clear(scan.edges, scan.waits, "a") == ["a"]
    scan.waits["x"] -= 1
    assert sorted(clear(scan.edges, scan.waits, "x")) == ["b", "c", "d", "x"]


@pytest.mark.parametrize(("targets", "leading"), [("d", "abd"), ("e", "ace"), ("de", "abcde"), ("", ""), ("a", "a")])
def test_what_leads_to_targets(targets: str, leading: str) -> None:
    edges = graph("a: b c; b: d; c: e -")
    assert "".join(leading_to(edges, "abcde", targets)) == leading


def test_only_ways_inside_count() -> None:
    assert leading_to(graph("a: b; b: c"), "ac", "c") == ["c"]


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
    scan.reach(starts)
    everything = reachable(edges, starts)
    assert scan.waits.keys() == everything
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
