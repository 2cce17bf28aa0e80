"""draw(): a picture of a context's graph on all workers, in Graphviz's DOT language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.context import DistributedContext
from hvlike.autograd.contexts import checked_id, contexts, id_in_words
from hvlike.autograd.local_graph import recv_of
from hvlike.errors import UsageError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.calls import rpc_async
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, in_context

SHAPES = {"root": "doublecircle", "node": "box", "leaf": "ellipse", "send": "cds", "recv": "house"}


@dataclass(frozen=True)
class DotNode:
    """A node of a local graph. number: unlike all others of its worker. kind: a key of SHAPES."""

    number: int
    kind: str
    text: str
    segments: tuple[int, ...] = ()
    """In which segments of the last backward gradients have come or gone here, from 1."""


@dataclass(frozen=True)
class WorkerGraph:
    """What one worker has of a distributed graph."""

    rank: int
    name: str
    nodes: tuple[DotNode, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    """Pairs of nodes, in the direction in which gradients go."""
    sends: dict[int, int] = field(default_factory=dict)
    """Message id -> the node of what was sent: gradients of that message come in there."""
    recvs: dict[int, int] = field(default_factory=dict)
    """Message id -> the node of what was received: gradients of that message go out there."""
    segments: tuple[str, ...] = ()
    """What the last backward has run there, in words, in this order."""


def write_dot(title: str, parts: Iterable[WorkerGraph]) -> str:
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


def _title(part: WorkerGraph) -> str:
    ran = [f"segment {number}: {segment}" for number, segment in enumerate(part.segments, 1)]
    return "\n".join([f"{part.name} (rank {part.rank})", *ran])


def _node(rank: int, node: DotNode) -> str:
    text, more = node.text, ""
    if node.segments:
        text += f"\nsegment{'s' * (len(node.segments) > 1)} {', '.join(map(str, node.segments))}"
        more = ", style=filled, fillcolor=lightyellow"
    return f"{_name(rank, node.number)} [shape={SHAPES[node.kind]}, label={quote(text)}{more}];"


def _name(rank: int, number: int) -> str:
    return f"w{rank}n{number}"


def _crossings(parts: list[WorkerGraph]) -> Iterator[tuple[str, str]]:
    """From where a message was received to where it was sent, for messages of which both ends are there."""
    sends = {message: _name(part.rank, number) for part in parts for message, number in part.sends.items()}
    for part in parts:
        for message, number in part.recvs.items():
            if message in sends:
                yield _name(part.rank, number), sends[message]


def draw(context_id: int, roots: Sequence[Tensor] = ()) -> str:
    """The graph of a context on all workers that it has reached, in Graphviz's DOT language.

    One cluster for each worker, with what leads to the tensors that it has sent; arrows show where gradients go, dashed
    ones between workers. After a backward, the segments that each worker has run stand above its part, and beside each
    message the segments that have used or made its gradients.
    context_id: from `context`. roots: tensors of this worker that backward is called with; their graph is drawn too.
    Any worker that knows the context; blocks until all that it has reached have answered. Not while a backward of the
    context is running.
    Returns DOT: `dot -Tsvg` draws it.
    Raises: RuntimeError "Could not find autograd context with id" where there is none; TypeError for an id that is no
        int; UsageError for roots that have no graph; what rpc_sync raises.
    """
    agent = current_agent()
    graph = LocalDrawing(agent, contexts.find(checked_id("draw", context_id)))
    for root in roots:
        if not isinstance(root, Tensor) or root.grad_fn is None:
            raise UsageError(f"draw: roots must be tensors that have a grad_fn, got {_describe(root)}.")
        graph.add_root(root)
    parts = [graph.part()]
    known, ask = {agent.rank}, graph.reached
    # Questions about a context are not a part of it.
    with in_context(NO_CONTEXT):
        while ask := ask - known:
            known |= ask
            futures = [rpc_async(rank, _part_of, (context_id,)) for rank in sorted(ask)]
            answers = [answer for future in futures if (answer := future.wait()) is not None]
            parts += [part for part, _ in answers]
            ask = {rank for _, reached in answers for rank in reached}
    return write_dot(f"autograd context {context_id}", parts)


class LocalDrawing:
    """What this worker has of a context's graph, piece by piece."""

    def __init__(self, agent: Agent, context: DistributedContext) -> None:
        self.reached = set(context.reached)
        """The workers that may have more of it."""
        self._agent = agent
        self._context = context
        self._nodes: list[DotNode] = []
        self._edges: list[tuple[int, int]] = []
        self._sends: dict[int, int] = {}
        self._recvs: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}
        """Of torch's nodes. Python's objects for them are equal only as long as somebody holds them."""
        for send in list(context.sends.values()):
            text = f"to {self._name(send.rank)}: {id_in_words(send.message)}\n{send.about}"
            number = self._sends[send.message] = self._add("send", text, self._segments("sends", send.message))
            self._lead(number, [edge.node for edge in send.edges])

    def add_root(self, tensor: Tensor) -> None:
        """Add a tensor that backward begins with, and what leads to it."""
        self._lead(self._add("root", f"root\n{_describe(tensor)}"), [get_gradient_edge(tensor).node])

    def part(self) -> WorkerGraph:
        """All of it. Messages that nothing was made of stand alone."""
        for recv in list(self._context.recvs.values()):
            if recv.message not in self._recvs:
                self._add_recv(recv.message, recv.rank)
        rank = self._agent.rank
        segments = [f"{segment.kind}, nodes: {segment.nodes}" for segment in self._context.segments]
        return WorkerGraph(
            rank, self._name(rank), tuple(self._nodes), tuple(self._edges), self._sends, self._recvs, tuple(segments)
        )

    def _lead(self, start: int, nodes: Sequence[Any]) -> None:
        """Draw edges to nodes of torch, and all that lies behind these."""
        todo: list[tuple[int, Any]] = [(start, node) for node in nodes]
        while todo:
            before, node = todo.pop()
            number = self._numbers.get(node)
            if number is None:
                number = self._numbers[node] = self._add_node(node)
                if recv_of(node) is None:
                    todo += [(number, child) for child, _ in node.next_functions if child is not None]
            self._edges.append((before, number))

    def _add_node(self, node: Any) -> int:
        recv, leaf = recv_of(node), getattr(node, "variable", None)
        if recv is not None:
            return self._add_recv(recv.message, recv.rank)
        if isinstance(leaf, Tensor):
            done = "\nhas a gradient" if leaf in self._context.gradients else ""
            return self._add("leaf", f"leaf\n{_describe(leaf)}{done}")
        return self._add("node", node.name())

    def _add_recv(self, message: int, rank: int) -> int:
        number = self._add("recv", f"from {self._name(rank)}: {id_in_words(message)}", self._segments("recvs", message))
        self._recvs[message] = number
        return number

    def _add(self, kind: str, text: str, segments: tuple[int, ...] = ()) -> int:
        number = len(self._nodes)
        self._nodes.append(DotNode(number, kind, text, segments))
        return number

    def _segments(self, end: str, message: int) -> tuple[int, ...]:
        """The segments of the last backward that have taken, or brought, the gradients of a message."""
        ran = enumerate(self._context.segments, 1)
        return tuple(number for number, segment in ran if message in getattr(segment, end))

    def _name(self, rank: int) -> str:
        return self._agent.workers[rank].name


def _part_of(context_id: int) -> tuple[WorkerGraph, set[int]] | None:
    """Runs on a worker: its part, and which workers may have more; None where the context is not."""
    if context_id not in contexts.live():
        return None
    picture = LocalDrawing(current_agent(), contexts.find(context_id))
    return picture.part(), picture.reached


def _describe(value: object) -> str:
    """Shape and dtype of a tensor; the type of anything else."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
