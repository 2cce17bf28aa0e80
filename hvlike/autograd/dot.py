"""Graphviz's DOT language for pictures of distributed graphs: pure text from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SHAPES = {"root": "doublecircle", "node": "box", "leaf": "ellipse", "send": "cds", "recv": "house"}


@dataclass(frozen=True)
class Node:
    """A node of a local graph. number: unlike all others of its worker. kind: a key of SHAPES."""

    number: int
    kind: str
    text: str
    segments: tuple[int, ...] = ()
    """In which segments of the last backward gradients have come or gone here, from 1."""


@dataclass(frozen=True)
class Part:
    """What one worker has of a distributed graph."""

    rank: int
    name: str
    nodes: tuple[Node, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    """Pairs of nodes, in the direction in which gradients go."""
    sends: dict[int, int] = field(default_factory=dict)
    """Message id -> the node of what was sent: gradients of that message come in there."""
    recvs: dict[int, int] = field(default_factory=dict)
    """Message id -> the node of what was received: gradients of that message go out there."""
    segments: tuple[str, ...] = ()
    """What the last backward has run there, in words, in this order."""


def write_dot(title: str, parts: Iterable[Part]) -> str:
    """The picture of a distributed graph: a cluster for each worker; arrows show where gradients go.

    title: stands above it. parts: of all workers that have something. Returns DOT, for `dot -Tsvg`.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    lines = ["digraph autograd {", f"  label={quote(title)}; labelloc=t; rankdir=LR;"]
    lines += ['  node [fontname="Helvetica", fontsize=10];']
    for part in ordered:
        lines += [f"  subgraph cluster_{part.rank} {{", f"    label={quote(_title(part))};"]
        lines += [f"    {_node(part.rank, node)}" for node in part.nodes]
        lines += [f"    {_name(part.rank, start)} -> {_name(part.rank, end)};" for start, end in part.edges]
        lines += ["  }"]
    lines += [f"  {start} -> {end} [style=dashed];" for start, end in _crossings(ordered)]
    return "\n".join([*lines, "}", ""])


def quote(text: str) -> str:
    """The text as a DOT string; line ends stay line ends."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _title(part: Part) -> str:
    ran = [f"segment {number}: {segment}" for number, segment in enumerate(part.segments, 1)]
    return "\n".join([f"{part.name} (rank {part.rank})", *ran])


def _node(rank: int, node: Node) -> str:
    text, more = node.text, ""
    if node.segments:
        text += f"\nsegment{'s' * (len(node.segments) > 1)} {', '.join(map(str, node.segments))}"
        more = ", style=filled, fillcolor=lightyellow"
    return f"{_name(rank, node.number)} [shape={SHAPES[node.kind]}, label={quote(text)}{more}];"


def _name(rank: int, number: int) -> str:
    return f"w{rank}n{number}"


def _crossings(parts: list[Part]) -> Iterator[tuple[str, str]]:
    """From where a message was received to where it was sent, for messages of which both ends are there."""
    sends = {message: _name(part.rank, number) for part in parts for message, number in part.sends.items()}
    for part in parts:
        for message, number in part.recvs.items():
            if message in sends:
                yield _name(part.rank, number), sends[message]
