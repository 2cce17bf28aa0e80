"""Pictures of distributed graphs as text: every node and edge once, edges between workers, texts that need quoting."""

import re

import pytest

from hvlike.autograd.graphviz import Cluster, quote, write_dot


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
