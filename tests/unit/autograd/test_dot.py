"""Pictures of distributed graphs as text: every node and edge once, edges between workers, texts that need quoting."""

import re

import pytest

from hvlike.autograd.graphviz import DotNode, WorkerGraph, quote, write_dot

# worker0: root -> recv 5, a leaf          worker1: send 5 -> node -> leaf
PARTS = [
    WorkerGraph(
        1,
        "trainer",
        (DotNode(0, "send", "to master", (1,)), DotNode(1, "node", "AddBackward0"), DotNode(2, "leaf", "leaf\n[2]")),
        ((0, 1), (1, 2)),
        sends={5: 0, 6: 0},
        segments=("final, nodes: 3",),
    ),
    WorkerGraph(
        0,
        "master",
        (
            DotNode(0, "root", 'a "root"'),
            DotNode(1, "recv", "from trainer", (1, 2)),
            DotNode(2, "recv", "from elsewhere"),
        ),
        ((0, 1),),
        recvs={5: 1, 7: 2},
    ),
]

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
    assert write_dot("two workers", PARTS) == PICTURE


def test_the_order_of_the_parts_does_not_matter() -> None:
    assert write_dot("two workers", reversed(PARTS)) == PICTURE


def test_nothing() -> None:
    assert re.fullmatch(r"digraph autograd \{\n.*\n.*\n\}\n", write_dot("", []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", '"plain"'), ('say "x"', r'"say \"x\""'), ("C:\\n", r'"C:\\n"'), ("a\nb", r'"a\nb"')],
)
def test_quoting(text: str, expected: str) -> None:
    assert quote(text) == expected
